// Which rows of which texts each pass of a batch computes, and what is drawn from them.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "inference/run/answer.h"
#include "inference/run/cache.h"
#include "inference/run/model.h"
#include "inference/run/prefixes.h"
#include "inference/run/sampler.h"

namespace overspill::inference {

/// What is asked for.
struct Request {
  std::vector<int32_t> tokens{};  // the prompt
  int64_t new_tokens_max = 1;
  Sampling sampling{};
  std::vector<int32_t> end_tokens{};  // end an answer, and are left out of it
  int64_t log_probabilities = 0;      // of so many tokens beside each that is drawn; 0: of none
  int64_t lookup = 0;  // tokens that are guessed from the text so far (lookup.h), for each pass
};

/// Texts that are computed together: each pass has a token of every text that draws, its guesses, and a slice
/// of the prompts that are still read. Texts come and go between passes. Where the share's pages do not
/// suffice, the text that came last waits: its pages are given back, and its tokens are read anew when there
/// is room.
///
/// What a text draws does not depend on the others: it is what a Session and a Sampler would draw alone, bit
/// for bit. Threads: one at a time.
class Scheduler {
 public:
  /// Throws std::invalid_argument unless `texts`, computed at a time at most, is from 1 to the smaller of
  /// kLogitsMax and the model's rows_max; NoRoom where the model's budget does not hold a cache of so many
  /// positions.
  Scheduler(std::shared_ptr<Model> model, int64_t texts, int64_t positions);

  /// Throws std::invalid_argument for a request that cannot be computed. Threads: any.
  void check(const Request& request) const;
  /// The request was checked. If nobody else holds the answer, or it ends, the text is dropped.
  void add(Request request, std::shared_ptr<Answer> answer);
  /// One forward. A text that ends is dropped, and so is one from whose logits nothing can be drawn; its
  /// answer has the error. Throws what the forward throws; then `end_all`.
  void pass();
  void end_all(End end, const std::exception_ptr& error = nullptr);

  int64_t texts() const { return static_cast<int64_t>(running_.size() + waiting_.size()); }
  /// Since the beginning: passes, positions that were computed, that were taken over from another text, and
  /// guesses that were right; texts that were put back.
  struct Counts {
    int64_t passes = 0, computed = 0, reused = 0, guessed = 0, put_back = 0;
  };
  const Counts& counts() const { return counts_; }

  const Model& model() const { return *model_; }

 private:
  struct Text {
    Request request;
    std::shared_ptr<Answer> answer;
    Sampler sampler;
    std::vector<int32_t> tokens;  // the prompt, then what was drawn
    std::vector<int32_t> guesses{};
    int64_t drawn = 0;
    int64_t known = 0;  // positions whose blocks the prefixes have
    int64_t rows = 0;   // of the pass at hand, guesses included
    int64_t right = 0;  // of its guesses
    bool ended = false;
    int64_t admitted = 0;            // positions for which it was given room
    std::unique_ptr<Cache> cache{};  // while it runs

    int64_t unread() const { return static_cast<int64_t>(tokens.size()) - cache->length(); }
  };

  void drop_ended();
  void admit();
  bool begin(Text& text);
  void plan();
  bool make_room(Text& text);
  void put_back_last();
  int64_t pages_of(int64_t positions) const;
  int64_t promised() const;
  void draw(Text& text, const float* logits, Drafts& drafts);
  Drawn described(const Text& text, int32_t token, const float* logits, Drafts& drafts) const;
  void finish_pass();

  std::shared_ptr<Model> model_;
  const int64_t texts_max_;
  Share share_;
  Prefixes prefixes_;
  std::deque<std::unique_ptr<Text>> running_;  // in the order in which they came
  std::deque<std::unique_ptr<Text>> waiting_;
  Counts counts_;
};

}  // namespace overspill::inference
