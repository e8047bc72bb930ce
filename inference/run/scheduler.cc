#include "inference/run/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "inference/kernels/forms.h"
#include "inference/run/lookup.h"

namespace overspill::inference {
namespace {

// Of prompts, in a pass in which other texts draw. A pass of so many rows takes about twice as long as one
// of a few, so a long prompt does not hold up the other texts.
constexpr int64_t kSliceRows = 32;

int64_t checked_texts(int64_t texts, int64_t rows_max) {
  if (texts >= 1 && texts <= rows_max) return texts;
  throw std::invalid_argument(fmt::format("texts is {}, and is to be from 1 to {}", texts, rows_max));
}

int64_t checked_positions(const Model& model, int64_t positions) {
  if (positions >= 1 && positions <= kPositionsMax) return Pool::pages(model.spec(), positions);
  throw std::invalid_argument(
      fmt::format("positions is {}, and is to be from 1 to {}", positions, kPositionsMax));
}

}  // namespace

Scheduler::Scheduler(std::shared_ptr<Model> model, int64_t texts, int64_t positions)
    : model_(std::move(model)),
      texts_max_(checked_texts(texts, std::min(model_->rows_max(), kLogitsMax))),
      share_(model_->pool(), checked_positions(*model_, positions)) {}

void Scheduler::check(const Request& request) const {
  model_->check_tokens(request.tokens);
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    if (value < least)
      throw std::invalid_argument(fmt::format("{} is {}, and is to be at least {}", name, value, least));
  };
  at_least("max_new_tokens", request.new_tokens_max, 1);
  at_least("log_probabilities", request.log_probabilities, 0);
  at_least("lookup", request.lookup, 0);
  for (const auto& [token, bias] : request.sampling.bias) model_->check_tokens({&token, 1});
  const Sampler checked(request.sampling);
  // The last token is drawn and not read. A sum of two such numbers does not overflow.
  const auto prompt = static_cast<int64_t>(request.tokens.size());
  const int64_t positions = prompt + std::min(request.new_tokens_max, kPositionsMax + 1) - 1;
  model_->check_length(positions);
  if (const int64_t pages = pages_of(positions); pages > share_.pages()) {
    throw std::invalid_argument(fmt::format(
        "a prompt of {} tokens and an answer of {} take {} bytes of cache, and the batch has {}; open "
        "it with more positions, or ask for a shorter answer",
        prompt, request.new_tokens_max, pages * share_.pool().page_bytes(),
        share_.pages() * share_.pool().page_bytes()));
  }
}

void Scheduler::add(Request request, std::shared_ptr<Answer> answer) {
  Sampler sampler(request.sampling);
  std::vector<int32_t> tokens = request.tokens;
  waiting_.push_back(std::make_unique<Text>(
      Text{std::move(request), std::move(answer), std::move(sampler), std::move(tokens)}));
}

void Scheduler::pass() {
  drop_ended();
  admit();
  plan();
  struct Drawing {
    Text* text;
    int64_t first, count;  // of the logits: behind its last token, and behind each guess
  };
  std::vector<Row> rows;
  std::vector<int32_t> wanted;
  std::vector<Drawing> drawing;
  for (const auto& text : running_) {
    const Drawing of{text.get(), static_cast<int64_t>(wanted.size()),
                     1 + static_cast<int64_t>(text->guesses.size())};
    for (int64_t i = 0; i < text->rows; ++i) {
      const auto at = static_cast<size_t>(text->cache->length() + i);
      const bool known = at < text->tokens.size();
      if (at + 1 >= text->tokens.size()) wanted.push_back(static_cast<int32_t>(rows.size()));
      rows.push_back({known ? text->tokens[at] : text->guesses[at - text->tokens.size()],
                      static_cast<int64_t>(at), text->cache.get()});
    }
    if (static_cast<int64_t>(wanted.size()) > of.first) drawing.push_back(of);
  }
  if (rows.empty()) return;
  model_->compute(rows, wanted, static_cast<int64_t>(drawing.size()),
                  [&](int64_t job, const Logits& logits, Drafts& drafts) {
                    const Drawing& of = drawing[static_cast<size_t>(job)];
                    for (int64_t i = 0; i < of.count; ++i) {
                      // Logits behind a wrong guess are of a text that is not this one.
                      if (of.text->right == i && !of.text->ended)
                        draw(*of.text, logits.of(of.first + i), drafts);
                    }
                  });
  ++counts_.passes;
  counts_.computed += static_cast<int64_t>(rows.size());
  finish_pass();
}

/// Those that were cancelled, and those whose answers nobody holds any more.
void Scheduler::drop_ended() {
  const auto gone = [&](const std::unique_ptr<Text>& text) {
    return text->answer.use_count() == 1 || text->answer->ended();
  };
  std::erase_if(running_, gone);
  std::erase_if(waiting_, gone);
}

void Scheduler::admit() {
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < texts_max_) {
    if (!begin(*waiting_.front())) return;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

int64_t Scheduler::pages_of(int64_t positions) const {
  return Cache::pages(model_->spec(), positions, model_->rows_max());
}

/// Pages that texts were given room for and have not taken yet: a prompt takes them slice by slice.
int64_t Scheduler::promised() const {
  int64_t pages = 0;
  for (const auto& text : running_) {
    if (text->cache->length() < text->admitted)
      pages += std::max<int64_t>(0, pages_of(text->admitted) - text->cache->held_pages());
  }
  return pages;
}

/// Gives the text a cache, if all of its tokens and the first that it draws find room without another text's
/// being put back.
bool Scheduler::begin(Text& text) {
  auto cache = std::make_unique<Cache>(model_->spec(), share_);
  prefixes_.find(text.tokens, *cache);
  const auto count = static_cast<int64_t>(text.tokens.size());
  text.admitted =
      std::min(count + 1, static_cast<int64_t>(text.request.tokens.size()) + text.request.new_tokens_max - 1);
  const int64_t lacks = pages_of(text.admitted) - cache->held_pages() + promised();
  if (lacks > share_.left() + prefixes_.idle_pages()) return false;
  while (lacks > share_.left() && prefixes_.drop_one()) {
  }
  counts_.reused += cache->length();
  text.known = cache->length();
  text.cache = std::move(cache);
  return true;
}

/// How many rows each text has in this pass. The text that came first is looked at first.
void Scheduler::plan() {
  const auto rows_max = model_->rows_max();
  const auto is_drawing = [](const std::unique_ptr<Text>& text) { return text->unread() == 1; };
  const int64_t drawing = std::ranges::count_if(running_, is_drawing);
  int64_t guesses_left = std::min((rows_max - drawing) / 2, kLogitsMax - std::ssize(running_));
  int64_t left = rows_max - drawing;
  // A pass that reads layers from disk costs about the same for one row and for all.
  int64_t slice_left = drawing > 0 && model_->streamed_bytes() == 0 ? kSliceRows : rows_max;
  for (const auto& text : running_) text->rows = 0;
  // Not an iterator: making room for one text may put back others behind it.
  // NOLINTNEXTLINE(modernize-loop-convert)
  for (size_t i = 0; i < running_.size(); ++i) {
    Text& text = *running_[i];
    text.guesses.clear();
    text.right = 0;
    if (text.unread() == 1) {
      // Of what is drawn, the last is not read.
      const int64_t most =
          std::min({text.request.lookup, guesses_left, left, text.request.new_tokens_max - text.drawn - 1});
      text.guesses = look_up(text.tokens, most);
      text.rows = 1 + static_cast<int64_t>(text.guesses.size());
      guesses_left -= text.rows - 1;
      left -= text.rows - 1;
    } else {
      text.rows = std::min({text.unread(), slice_left, left});
      slice_left -= text.rows;
      left -= text.rows;
    }
    if (text.rows > 0 && !make_room(text)) return;
  }
}

/// False where the text, which came last, had to be put back.
bool Scheduler::make_room(Text& text) {
  while (!text.cache->make_room(text.cache->length() + text.rows)) {
    if (prefixes_.idle_pages() > 0 && prefixes_.drop_one()) continue;
    if (!text.guesses.empty()) {  // they are not worth another text's place
      text.guesses.clear();
      text.rows = 1;
      continue;
    }
    const bool itself = running_.back().get() == &text;
    put_back_last();
    if (itself) return false;
  }
  return true;
}

void Scheduler::put_back_last() {
  Text& text = *running_.back();
  text.cache.reset();
  text.rows = 0;
  ++counts_.put_back;
  waiting_.push_front(std::move(running_.back()));
  running_.pop_back();
}

void Scheduler::draw(Text& text, const float* logits, Drafts& drafts) {
  const auto vocabulary = static_cast<size_t>(model_->spec().vocabulary);
  int32_t token = 0;
  try {
    token = text.sampler.draw({logits, vocabulary}, text.tokens, drafts);
  } catch (const std::invalid_argument&) {
    text.answer->end(End::failed, std::current_exception());
    text.ended = true;
    return;
  }
  if (std::ranges::find(text.request.end_tokens, token) != text.request.end_tokens.end()) {
    text.answer->end(End::stop);
    text.ended = true;
    return;
  }
  text.answer->add(described(text, token, logits, drafts));
  if (++text.drawn == text.request.new_tokens_max) {
    text.answer->end(End::length);
    text.ended = true;
    return;
  }
  const auto next = static_cast<size_t>(text.right);
  if (next < text.guesses.size() && text.guesses[next] == token) ++text.right;
  text.tokens.push_back(token);
}

Drawn Scheduler::described(const Text& text, int32_t token, const float* logits, Drafts& drafts) const {
  Drawn drawn{.token = token};
  if (text.request.log_probabilities == 0) return drawn;
  const int64_t vocabulary = model_->spec().vocabulary;
  const float total = model_->kernels().log_sum_exp(logits, vocabulary);
  drawn.log_probability = logits[token] - total;
  const std::span<int32_t> order = drafts.tokens(vocabulary);
  const auto end = order.begin() + std::min(vocabulary, text.request.log_probabilities);
  std::partial_sort(order.begin(), end, order.end(), [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  for (auto it = order.begin(); it != end; ++it) drawn.likeliest.emplace_back(*it, logits[*it] - total);
  return drawn;
}

/// What was computed is kept: for the text itself, and for others that begin alike.
void Scheduler::finish_pass() {
  for (const auto& text : running_) {
    const auto guesses = static_cast<int64_t>(text->guesses.size());
    const int64_t length = text->cache->length() + text->rows - guesses + text->right;
    counts_.guessed += text->right;
    text->cache->set_length(length);
    const int64_t whole = length / kBlockPositions * kBlockPositions;
    const int64_t kept = text->ended ? length : whole;
    if (kept > text->known)
      prefixes_.add(std::span(text->tokens).first(static_cast<size_t>(kept)), *text->cache);
    text->known = kept;
  }
  std::erase_if(running_, [](const std::unique_ptr<Text>& text) { return text->ended; });
}

void Scheduler::end_all(End end, const std::exception_ptr& error) {
  for (auto* texts : {&running_, &waiting_}) {
    for (const auto& text : *texts) text->answer->end(end, error);
    texts->clear();
  }
}

}  // namespace overspill::inference
