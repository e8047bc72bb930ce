// Texts that are computed together against each of them alone, bit for bit; and what they share, wait for and
// give back. The last tests are of threads.
#include "inference/run/batch.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "inference/error.h"
#include "inference/run/lookup.h"
#include "inference/run/session.h"
#include "tests/inference/tiny_model.h"

namespace overspill::inference {
namespace {

using Tokens = std::vector<int32_t>;

Tokens some_tokens(uint32_t seed, int64_t count) {
  std::mt19937 random(seed);
  Tokens tokens;
  for (int64_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(TinyModel::kVocabulary)));
  return tokens;
}

/// Of many lengths, some of which begin alike, every other one sampled. With the probabilities of all tokens.
Request request(uint32_t i) {
  Request made;
  made.tokens = some_tokens(i % 3, 1 + 37 * i % 150);
  const Tokens own = some_tokens(i + 10, 1 + i % 5);
  made.tokens.insert(made.tokens.end(), own.begin(), own.end());
  made.new_tokens_max = 1 + 13 * i % 40;
  if (i % 2 == 1) made.sampling = {.temperature = 0.9f, .top_k = 30, .repetition = 1.1f, .seed = i};
  made.log_probabilities = TinyModel::kVocabulary;
  return made;
}

/// A session, a sampler, and a token a pass: nothing is shared, guessed or put together.
std::vector<Drawn> alone(const std::shared_ptr<Model>& model, const Request& asked) {
  Session session(model, static_cast<int64_t>(asked.tokens.size()) + asked.new_tokens_max - 1);
  Sampler sampler(asked.sampling);
  Drafts drafts;
  std::vector<float> logits(TinyModel::kVocabulary);
  std::vector<Drawn> found;
  Tokens unread = asked.tokens;
  for (int64_t i = 0; i < asked.new_tokens_max; ++i) {
    session.extend(unread, logits);
    Drawn drawn{.token = sampler.draw(logits, session.tokens(), drafts)};
    const float total = model->kernels().log_sum_exp(logits.data(), TinyModel::kVocabulary);
    for (int32_t token = 0; token < TinyModel::kVocabulary; ++token)
      drawn.likeliest.emplace_back(token, logits[static_cast<size_t>(token)] - total);
    drawn.log_probability = drawn.likeliest[static_cast<size_t>(drawn.token)].second;
    unread = {drawn.token};
    found.push_back(std::move(drawn));
  }
  return found;
}

std::vector<Drawn> all_of(Answer& answer) {
  std::vector<Drawn> found;
  while (std::optional<Drawn> drawn = answer.take()) {
    std::ranges::sort(drawn->likeliest);  // by token
    found.push_back(std::move(*drawn));
  }
  return found;
}

void expect_same(const std::vector<Drawn>& found, const std::vector<Drawn>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].token, wanted[i].token) << i;
    ASSERT_EQ(found[i].log_probability, wanted[i].log_probability) << i;
    ASSERT_EQ(found[i].likeliest, wanted[i].likeliest) << i;
  }
}

class BatchTest : public testing::Test {
 protected:
  const std::vector<std::vector<Drawn>>& wanted() {
    if (wanted_.empty()) {
      const auto model = folder_.load();
      for (uint32_t i = 0; i < kRequests; ++i) wanted_.push_back(alone(model, request(i)));
    }
    return wanted_;
  }
  /// Adds the requests at random passes, in a random order.
  Scheduler::Counts run(const std::shared_ptr<Model>& model, int64_t texts, int64_t positions, int64_t lookup,
                        uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<uint32_t> order(kRequests);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random);
    Scheduler scheduler(model, texts, positions);
    std::map<uint32_t, std::shared_ptr<Answer>> answers;
    while (!order.empty() || scheduler.texts() > 0) {
      if (!order.empty() && (random() % 4 == 0 || scheduler.texts() == 0)) {
        Request asked = request(order.back());
        asked.lookup = lookup;
        scheduler.check(asked);
        const auto answer = answers[order.back()] = std::make_shared<Answer>();
        scheduler.add(std::move(asked), answer);
        order.pop_back();
      }
      scheduler.pass();
    }
    for (const auto& [i, answer] : answers) {
      EXPECT_EQ(answer->ended(), End::length);
      expect_same(all_of(*answer), wanted()[i]);
    }
    return scheduler.counts();
  }

  static constexpr uint32_t kRequests = 16;
  TinyModel folder_;
  std::vector<std::vector<Drawn>> wanted_;
};

TEST_F(BatchTest, WhatATextDrawsDoesNotDependOnTheOthers) {
  for (const int threads : {1, 3}) {
    const auto model = folder_.load({.threads = threads});
    for (const int64_t texts : {1, 3, 8}) {
      const auto counts = run(model, texts, 4096, 0, static_cast<uint32_t>(texts + threads));
      EXPECT_GT(counts.reused, 0);
      EXPECT_EQ(counts.put_back, 0);
    }
  }
}

TEST_F(BatchTest, NorOnWhetherTheCacheIsFull) {
  const auto model = folder_.load({.threads = 2});
  int64_t put_back = 0;
  for (uint32_t seed = 0; seed < 4; ++seed) put_back += run(model, 8, 256 + 64 * seed, 0, seed).put_back;
  EXPECT_GT(put_back, 0);
}

TEST_F(BatchTest, NorOnGuesses) {
  const auto model = folder_.load({.threads = 2});
  for (const int64_t lookup : {1, 5, 1000}) EXPECT_GT(run(model, 4, 512, lookup, 1).guessed, 0);
}

TEST_F(BatchTest, NorOnHowManyRowsAPassHas) {
  run(folder_.load({.rows_max = 8}), 8, 1024, 3, 1);
  run(folder_.load({.rows_max = 500}), 8, 1024, 3, 1);
}

TEST_F(BatchTest, ALongPromptGoesInBySlicesWhileAnotherTextDraws) {
  Scheduler scheduler(folder_.load(), 2, 2048);
  const auto drawing = std::make_shared<Answer>(), reading = std::make_shared<Answer>();
  scheduler.add({.tokens = {5}, .new_tokens_max = 100}, drawing);
  scheduler.pass();
  ASSERT_TRUE(drawing->take());
  scheduler.add({.tokens = some_tokens(1, 640), .new_tokens_max = 1}, reading);
  for (int pass = 0; pass < 20; ++pass) {
    EXPECT_FALSE(reading->ended());
    const int64_t before = scheduler.counts().computed;
    scheduler.pass();
    EXPECT_EQ(scheduler.counts().computed - before, 33);
    ASSERT_TRUE(drawing->wait(std::chrono::nanoseconds(0)));
    drawing->take();
  }
  EXPECT_EQ(reading->ended(), End::length);
}

TEST_F(BatchTest, ABeginningIsSharedAndDepartingFromItChangesNothing) {
  const auto model = folder_.load();
  Scheduler scheduler(model, 1, 1024);
  const auto answer_to = [&](const Tokens& prompt) {
    const Request asked{.tokens = prompt, .new_tokens_max = 3, .log_probabilities = TinyModel::kVocabulary};
    const auto answer = std::make_shared<Answer>();
    const int64_t before = scheduler.counts().reused;
    scheduler.add(asked, answer);
    while (scheduler.texts() > 0) scheduler.pass();
    expect_same(all_of(*answer), alone(model, asked));
    return scheduler.counts().reused - before;
  };
  const Tokens whole = some_tokens(1, 100);
  EXPECT_EQ(answer_to(whole), 0);
  EXPECT_EQ(answer_to(whole), 99);  // the last is read for its logits
  for (const size_t alike : {size_t{1}, size_t{64}, size_t{70}, size_t{99}, size_t{30}}) {
    Tokens other(whole.begin(), whole.begin() + static_cast<int64_t>(alike));
    for (int i = 0; i < 20; ++i) other.push_back((whole[alike] + 1) % TinyModel::kVocabulary);
    EXPECT_EQ(answer_to(other), alike);
  }
  EXPECT_EQ(answer_to(whole), 99);
  EXPECT_EQ(answer_to({whole.begin(), whole.begin() + 64}), 63);
}

TEST_F(BatchTest, RoomIsPromisedOnce) {
  // Two prompts and their answers fill the pages, slice by slice, and the first draws while the others read.
  const auto model = folder_.load({.rows_max = 64});
  Scheduler scheduler(model, 8, 704);
  std::vector<std::shared_ptr<Answer>> answers;
  for (uint32_t i = 0; i < 8; ++i) {
    answers.push_back(std::make_shared<Answer>());
    scheduler.add({.tokens = some_tokens(i, 600), .new_tokens_max = 40}, answers.back());
  }
  while (scheduler.texts() > 0) scheduler.pass();
  for (const auto& answer : answers) EXPECT_EQ(answer->ended(), End::length);
  EXPECT_EQ(scheduler.counts().put_back, 0);
  EXPECT_EQ(scheduler.counts().computed, 8 * (600 + 39));
}

void run_with_little_stack(const std::function<void()>& work) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, size_t{256} << 10), 0);
  pthread_t thread;
  const auto run = [](void* given) -> void* {
    (*static_cast<const std::function<void()>*>(given))();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, const_cast<std::function<void()>*>(&work)), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

TEST_F(BatchTest, ALongBeginningTakesNoStack) {
  const auto model = folder_.load();
  constexpr int64_t kBlocks = 20'000;
  Pool pool(model->spec(), Element::bf16, 3);
  Share share(pool, 3);
  std::vector<Page> pages;
  for (int i = 0; i < 3; ++i) pages.push_back(share.take());
  const Tokens tokens = some_tokens(1, kBlocks * kBlockPositions);
  // All blocks have the same pages.
  run_with_little_stack([&] {
    Prefixes prefixes;
    {
      Cache cache(model->spec(), share);
      for (int64_t block = 0; block < kBlocks; ++block) cache.set_block(block, pages);
      prefixes.add(tokens, cache);
    }
    EXPECT_EQ(prefixes.idle_pages(), 0);
    Cache found(model->spec(), share);
    prefixes.find(tokens, found);
    EXPECT_EQ(found.length(), (kBlocks - 1) * kBlockPositions);
    EXPECT_TRUE(prefixes.drop_one());
  });
}

TEST_F(BatchTest, BlocksThatNoWindowSeesAreGivenBack) {
  const auto model = folder_.load({.rows_max = 16});
  const ModelSpec& spec = model->spec();
  Share share(model->pool(), 1000);
  Cache cache(spec, share);
  for (int64_t length = 0; length < 640; length += 16) {
    ASSERT_TRUE(cache.make_room(length + 16));
    cache.set_length(length + 16);
    EXPECT_LE(cache.held_pages(), Cache::pages(spec, length + 16, 16));
    EXPECT_EQ(cache.held_pages(), share.pages() - share.left());
  }
  // The first layer sees all of them; a window of 24 and 16 rows lie in two blocks at most.
  EXPECT_EQ(Cache::pages(spec, 640, 16), 10 + 2 * 2);
  EXPECT_LE(cache.held_pages(), 10 + 2 * 2);
  EXPECT_TRUE(cache.can_go_on_at(630));
  EXPECT_FALSE(cache.can_go_on_at(300));
}

TEST_F(BatchTest, ASessionReadsAnewWhatItGaveBack) {
  const auto model = folder_.load({.threads = 2});
  const Tokens tokens = some_tokens(4, 400);
  std::vector<float> whole(tokens.size() * TinyModel::kVocabulary), again(whole.size());
  Session session(model, 400);
  session.extend_all(tokens, whole);
  for (const int64_t length : {390, 200, 10, 0}) {
    session.rewind(length);
    EXPECT_EQ(session.length(), length);
    const auto rest = std::span(tokens).subspan(static_cast<size_t>(length));
    const auto found = std::span(again).first(rest.size() * TinyModel::kVocabulary);
    session.extend_all(rest, found);
    EXPECT_TRUE(std::ranges::equal(found, std::span(whole).last(found.size())));
  }
}

TEST_F(BatchTest, ASessionsGuessesChangeNoToken) {
  const auto model = folder_.load();
  for (const float temperature : {0.0f, 0.3f}) {
    std::vector<Tokens> found;
    size_t passes = 0;
    for (const int64_t lookup : {0, 1, 6, 1000}) {
      Session session(model, 200);
      Sampler sampler({.temperature = temperature, .seed = 3, .bias = {{1, 20.0f}, {2, 20.0f}}});
      Tokens drawn, unread = some_tokens(1, 30);
      for (passes = 0; drawn.size() < 100; ++passes) {
        unread =
            session.draw(unread, sampler, std::min<int64_t>(lookup, 99 - static_cast<int64_t>(drawn.size())));
        drawn.insert(drawn.end(), unread.begin(), unread.end());
        unread = {unread.back()};
      }
      EXPECT_TRUE(lookup > 0 || passes == 100) << passes;
      found.push_back(drawn);
    }
    EXPECT_LT(passes, 90u);
    for (const Tokens& tokens : found) EXPECT_EQ(tokens, found[0]);
  }
}

TEST_F(BatchTest, ABudgetCountsSharesAndAPoolUnmapsWhatIsFree) {
  const auto model = folder_.load();
  Pool pool(model->spec(), Element::bf16, 5);
  std::vector<Page> kept;
  {
    Share share(pool, 3);
    EXPECT_THROW(Share(pool, 3), NoRoom);
    Share other(pool, 2);
    for (int i = 0; i < 3; ++i) kept.push_back(share.take());
    EXPECT_EQ(share.take(), nullptr);
    const Page second_holder = kept[0];
    kept[0].reset();
    EXPECT_EQ(share.left(), 0);
    kept.clear();
    EXPECT_EQ(share.left(), 2);
  }
  Share all(pool, 5);
  EXPECT_NE(all.take(), nullptr);
}

TEST(Lookup, WhatFollowedTheLastTokensBefore) {
  const auto find = [](const Tokens& text, int64_t most) { return look_up(text, most); };
  EXPECT_EQ(find({1, 2, 3, 4, 5, 9, 1, 2, 3}, 2), (Tokens{4, 5}));
  EXPECT_EQ(find({1, 2, 3, 4, 8, 1, 2, 3, 5, 8, 1, 2, 3}, 1), (Tokens{5}));  // the later one
  EXPECT_EQ(find({7, 2, 3, 4, 9, 2, 3}, 9), (Tokens{4, 9, 2, 3}));           // two are alike
  EXPECT_EQ(find({5, 5, 5, 5}, 9), (Tokens{5}));
  EXPECT_TRUE(find({1, 2, 3, 4}, 9).empty());
  EXPECT_TRUE(find({1, 2, 1, 2, 1, 2}, 0).empty());
  EXPECT_TRUE(find({}, 3).empty());
  EXPECT_TRUE(find({1}, 3).empty());
}

TEST_F(BatchTest, InACacheOfEightBitsTooEachTextIsAsItIsAlone) {
  const auto model = folder_.load({.threads = 2, .cache = CacheFormat::int8});
  const int64_t narrow = Pool::page_bytes(model->spec(), Element::int8);
  EXPECT_EQ(model->pool().page_bytes(), narrow);
  EXPECT_LT(narrow, Pool::page_bytes(model->spec(), Element::bf16));
  std::vector<Drawn> in_bf16 = wanted()[4];
  wanted_.clear();
  for (uint32_t i = 0; i < kRequests; ++i) wanted_.push_back(alone(model, request(i)));
  EXPECT_NE(wanted_[4].front().log_probability, in_bf16.front().log_probability);
  EXPECT_GT(run(model, 5, 700, 4, 1).reused, 0);
}

// Threads and processes.

TEST_F(BatchTest, AForkedChildIsToldWhileAnotherThreadComputes) {
  const auto model = folder_.load();
  std::promise<void> computes, ends;
  std::thread thread([&] {
    Share share(model->pool(), 1000);
    Cache cache(model->spec(), share);
    ASSERT_TRUE(cache.make_room(1));
    const Row row{1, 0, &cache};
    const int32_t wanted = 0;
    model->compute({&row, 1}, {&wanted, 1}, 1, [&](int64_t, const Logits&, Drafts&) {
      computes.set_value();
      ends.get_future().wait();
    });
  });
  computes.get_future().wait();
  Session session(model, 5);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // a child that waits is ended
    int told = 0;
    const auto expect_told = [&](const auto& work) {
      try {
        work();
      } catch (const WrongProcess&) {
        ++told;
      }
    };
    std::vector<float> logits(TinyModel::kVocabulary);
    expect_told([&] { session.extend(std::vector<int32_t>{1}, logits); });
    expect_told([&] { model->seconds_a_pass(); });
    expect_told([&] { model->compute_each({}, {}, [](int64_t, const float*, Drafts&) {}); });
    expect_told([&] { model->compute({}, {}, 0, [](int64_t, const Logits&, Drafts&) {}); });
    expect_told([&] { Session(model, 1); });
    _exit(told);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ends.set_value();
  thread.join();
  EXPECT_TRUE(WIFEXITED(status)) << "it waited";
  EXPECT_EQ(WEXITSTATUS(status), 5);
}

TEST_F(BatchTest, ManyThreadsAskAtOnce) {
  const auto model = folder_.load({.threads = 3});
  wanted();
  Batch batch(model, {.texts = 4, .positions = 512, .waiting = 100});
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint32_t i = thread; i < kRequests; i += 4) {
        const auto answer = batch.submit(request(i));
        const auto dropped = batch.submit(request(i + 1));
        if (i % 3 == 0) dropped->cancel();
        expect_same(all_of(*answer), wanted_[i]);
        EXPECT_GE(batch.counts().passes, 0);
      }
    });
  }
  // A session takes turns with the batch.
  for (int i = 0; i < 5; ++i) expect_same(alone(model, request(7)), wanted_[7]);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(BatchTest, LayersThatAreReadFromDiskChangeNothing) {
  wanted();
  std::shared_ptr<Model> model;
  for (int64_t budget = 100'000; model == nullptr; budget += 5'000) {
    try {
      model = folder_.load({.threads = 2, .budget_bytes = budget, .positions = 512});
    } catch (const NoRoom&) {
    }
  }
  ASSERT_GT(model->streamed_bytes(), 0);
  Batch batch(model, {.texts = 8, .positions = 512});
  EXPECT_THROW(Session(model, 1), NoRoom);
  std::vector<std::shared_ptr<Answer>> answers;
  for (uint32_t i = 0; i < kRequests; ++i) answers.push_back(batch.submit(request(i)));
  for (uint32_t i = 0; i < kRequests; ++i) expect_same(all_of(*answers[i]), wanted_[i]);
}

TEST_F(BatchTest, RequestsBeyondThoseThatMayWaitAreRefused) {
  Batch batch(folder_.load(), {.texts = 1, .positions = 10'000'000, .waiting = 1});
  const Request endless{.tokens = {1}, .new_tokens_max = 9'000'000};  // would take an hour
  const auto first = batch.submit(endless), second = batch.submit(endless);
  EXPECT_THROW(batch.submit(endless), QueueFull);
  EXPECT_TRUE(first->take());
  batch.close();
  EXPECT_EQ(first->ended(), End::cancelled);
  EXPECT_EQ(second->ended(), End::cancelled);
  EXPECT_THROW(batch.submit(endless), std::logic_error);
}

TEST_F(BatchTest, AnAnswerThatIsCancelledMakesRoomAtOnce) {
  Batch batch(folder_.load(), {.texts = 2, .positions = 1024, .waiting = 1});
  const Request endless{.tokens = {1}, .new_tokens_max = 300};
  std::deque<std::shared_ptr<Answer>> answers;
  for (int i = 0; i < 3; ++i) answers.push_back(batch.submit(endless));
  for (int i = 0; i < 300; ++i) {
    answers.front()->cancel();
    answers.pop_front();
    ASSERT_NO_THROW(answers.push_back(batch.submit(endless))) << i;
  }
}

TEST_F(BatchTest, AnAnswerThatNobodyHoldsIsNotGoneOnWith) {
  Batch batch(folder_.load(), {.texts = 1, .positions = 10'000'000, .waiting = 4});
  // Each would take an hour.
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(batch.submit({.tokens = {1}, .new_tokens_max = 9'000'000})->take());
  EXPECT_TRUE(batch.submit({.tokens = {1}, .new_tokens_max = 1})->take());
}

}  // namespace
}  // namespace overspill::inference
