#include "tests/engine/cut_fixture.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <utility>

#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/resources.h"
#include "io/part_folder.h"
#include "tests/engine/equal_store.h"
#include "tests/engine/rank_world.h"
#include "tests/engine/toy_model.h"
#include "tests/test_folders.h"

namespace overspill::testing {

namespace fs = std::filesystem;
using engine::Config;
using engine::Engine;
using optim::Format;

namespace {

thread_local bool never_waits = false;

constexpr std::string_view kJobFolders = "overspill-";

bool is_of_training(std::string_view path) {
  return path.find("/overspill-cut") != std::string_view::npos &&
         path.find("/slab-mark") == std::string_view::npos;
}

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Else the next save would not remove what a killed one leaves.
void expect_names_of_a_save(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder))
    EXPECT_TRUE(engine::is_file_of_a_save(entry.path().filename().string())) << entry.path();
}

std::vector<fs::path> parts_of(const fs::path& checkpoint) {
  std::vector<fs::path> paths;
  for (const io::PartFolder& part : io::parts_of(checkpoint)) paths.push_back(part.path);
  return paths;
}

}  // namespace

std::vector<engine::UnitSpec> cut_units(int64_t rows) {
  return {{"embed", Format::exact, "BF16", {{"embed.weight", {rows, 64}, 0, {}}}},
          {"scale", Format::fp32, "F32", {{"scale.weight", {900}, 1, {}}}},
          {"frozen", engine::kFrozen, "F32", {{"frozen.weight", {300}, 0, {}}}}};
}

fs::path cut_folder(const std::string& name) {
  const fs::path memory = "/dev/shm";
  return empty_folder(fs::is_directory(memory) ? memory : fs::temp_directory_path(), "cut-" + name);
}

// ---- turns

void DiskInTurns::let_this_thread_go_on() {
  never_waits = true;
}

void DiskInTurns::set_turns(bool on) {
  const std::lock_guard lock(turns_mutex_);
  in_turns_ = on;
  changed_.notify_all();
}

int DiskInTurns::failure_of(const FileCall& call) {
  using Kind = FileCall::Kind;
  const Kind kind = call.kind;
  const bool waits = kind == Kind::sync || kind == Kind::link || kind == Kind::rename ||
                     kind == Kind::make_folder || kind == Kind::allocate;
  if (waits && !never_waits) {
    std::unique_lock lock(turns_mutex_);
    changed_.wait(lock, [this, before = written_] { return !in_turns_ || written_ != before; });
  }
  return Disk::failure_of(call);
}

void DiskInTurns::done(const FileCall& call, std::span<const std::byte> data) {
  Disk::done(call, data);
  if (call.kind != FileCall::Kind::write || !is_of_training(path_of(call))) return;
  const std::lock_guard lock(turns_mutex_);
  ++written_;
  changed_.notify_all();
}

// ---- the run

/// One rank of the run, on its thread.
class Cut::Rank {
 public:
  Rank(Cut& cut, int rank, std::unique_ptr<engine::Communicator> ranks, std::barrier<>& all)
      : cut_(cut), rank_(rank), all_(all), engine_(cut.engine_of(rank, std::move(ranks))) {
    DiskInTurns::let_this_thread_go_on();
    toy_load(*engine_);
  }

  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      const engine::StepResult result = toy_step(*engine_, static_cast<int>(results.size()), 1, rank_).result;
      results.push_back(result);
    }
  }

  void begin_save(const char* name) {
    if (blocking()) engine_->synchronize();
    together([&] {
      if (std::string_view(name) == "two") cut_.before_two_ = cut_.disk_.calls();
      cut_.saved_.push_back(
          {.name = name, .step = static_cast<int>(results.size()), .begun = cut_.disk_.calls()});
      if (!blocking()) cut_.disk_.begin_turns();
    });
    const engine::WriteBeside nothing = [](const fs::path&) { return std::string("{}"); };
    if (!blocking()) return engine_->save_in_background(cut_.root_ / name, nothing);
    engine_->save(cut_.root_ / name, nothing);
    note_save();
  }

  void end_save() {
    if (blocking()) return engine_->synchronize();
    together([&] { cut_.disk_.end_turns(); });
    engine_->wait_for_save();
    note_save();
  }

  void remove_the_first() {
    if (blocking()) engine_->synchronize();
    together([&] {
      SavedInCut& first = cut_.saved_[0];
      first.deleted = cut_.disk_.calls();
      engine::remove_save(cut_.root_ / first.name);
    });
  }

  void end() {
    engine_->synchronize();
    together([&] {
      cut_.end_ = cut_.disk_.calls();
      cut_.expect_all_was_seen();
    });
  }

  std::vector<engine::StepResult> results;

 private:
  bool blocking() const { return GetParam().saves == CutCase::Saves::blocking; }

  void together(const std::function<void()>& once) {
    all_.arrive_and_wait();
    if (rank_ == 0) once();
    all_.arrive_and_wait();
  }

  void note_save() {
    together([&] {
      SavedInCut& saved = cut_.saved_.back();
      saved.after = cut_.disk_.calls();
      expect_names_of_a_save(cut_.root_ / saved.name);
      saved.parts = parts_of(cut_.root_ / saved.name);
      EXPECT_EQ(!saved.parts.empty(), GetParam().links && GetParam().paths > 1);
    });
  }

  Cut& cut_;
  const int rank_;
  std::barrier<>& all_;
  std::unique_ptr<Engine> engine_;
};

void Cut::TearDown() {
  reader_.reset();
  fs::remove_all(root_);
}

std::vector<fs::path> Cut::nvme() const {
  std::vector<fs::path> paths{root_ / "nvme"};
  for (int path = 1; path < GetParam().paths; ++path) paths.push_back(root_ / fmt::format("nvme-{}", path));
  return paths;
}

void Cut::record() {
  const WatchedFiles watched(disk_);
  if (!GetParam().links) disk_.refuse_links();
  for (const fs::path& path : nvme()) {
    ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
    if (path != nvme().front()) disk_.mount(path);
  }
  std::barrier<> all(GetParam().world);
  std::vector<engine::StepResult> results;
  const auto errors = on_ranks(GetParam().world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    Rank run(*this, rank, std::move(ranks), all);
    run.train(1);
    run.begin_save("elsewhere/one");  // no other save makes this folder's entries durable
    run.train(2);
    run.end_save();
    run.begin_save("two");
    run.train(2);  // of two steps the first's updates are written before the second is over
    run.remove_the_first();
    run.end_save();
    run.begin_save("three");
    run.train(2);
    run.end_save();
    run.end();
    if (rank == 0) results = run.results;
  });
  for (const std::string& error : errors) ASSERT_EQ(error, "");
  ASSERT_EQ(saved_.size(), 3U);
  note_contents(results);
  after_two_ = saved_[1].after;
}

/// By the scalar reference: what the engine itself says would wait for updates that are to come.
void Cut::note_contents(const std::vector<engine::StepResult>& results) {
  ToyReference reference(units());
  int step = 0;
  for (SavedInCut& saved : saved_) {
    for (; step < saved.step; ++step) {
      const auto absent = [step](int unit, int segment, int rank) {
        return toy_skips(unit, segment, step, rank);
      };
      reference.advance(step, 1, results[step].clip, absent, GetParam().world);
    }
    saved.contents = reference.contents();
  }
  EXPECT_NE(saved_[0].contents, saved_[1].contents);
  EXPECT_NE(saved_[1].contents, saved_[2].contents);
}

/// Each rank has some of the largest, of which ranks have no less than 2048 elements while there are any.
std::vector<engine::UnitSpec> Cut::units() const {
  return GetParam().world > 2 ? cut_units(104) : cut_units();
}

Config Cut::config_of(int rank) const {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = nvme();
  config.job = rank == 0 ? "cut" : fmt::format("cut-{}", rank);
  config.threads = 1;
  config.chunk_elements = 2048;
  config.placement = GetParam().placement;
  config.checkpoints_kept = 2;
  return config;
}

std::unique_ptr<Engine> Cut::engine_of(int rank, std::unique_ptr<engine::Communicator> ranks) const {
  const Config config = config_of(rank);
  if (GetParam().world == 1) ranks.reset();
  engine::Resources resources =
      make_resources(units(), config, {"host", "memory", static_cast<uint64_t>(rank + 1)}, std::move(ranks));
  if (std::string_view(GetParam().store) == "threads") {
    // It measures nothing: that would be in the log.
    resources.store = equally_fast_store(config);
    resources.watch = resources.store->watch();
  }
  return std::make_unique<Engine>(units(), config, std::move(resources));
}

/// What the log leaves where nothing is lost is what lies there: no call went past it.
void Cut::expect_all_was_seen() const {
  const fs::path seen = cut_folder("seen");
  disk_.leave(disk_.calls(), {}, {}, "", seen);
  for (const auto& entry : fs::recursive_directory_iterator(root_)) {
    const fs::path other = seen / fs::relative(entry.path(), root_);
    ASSERT_TRUE(fs::exists(other)) << other;
    if (!entry.is_regular_file()) continue;
    EXPECT_TRUE(content(entry.path()) == content(other)) << other;
  }
  for (const auto& entry : fs::recursive_directory_iterator(seen)) {
    ASSERT_TRUE(fs::exists(root_ / fs::relative(entry.path(), seen))) << entry.path();
  }
  fs::remove_all(seen);
}

int64_t Cut::trained_during(const SavedInCut& saved) const {
  int64_t writes = 0;
  for (size_t call = saved.begun; call < saved.after; ++call) {
    const std::string text = disk_.text(call);
    if (text == "rename " + saved.name) return writes;
    writes += is_of_training(text) ? 1 : 0;
  }
  ADD_FAILURE() << saved.name << " was never given its name";
  return 0;
}

// ---- the cut

/// The disk lies where it lay, since checkpoints know their parts by paths. What of a job's folder is left
/// goes when the next run starts.
std::string Cut::wrong(const Disk& disk, size_t calls, const std::set<size_t>& lost,
                       const std::set<size_t>& torn) {
  ++cuts_;
  fs::remove_all(root_);
  disk.leave(calls, lost, torn, kJobFolders, root_);
  for (const SavedInCut& saved : saved_) {
    const bool deleting = calls > saved.deleted;
    if (!fs::exists(root_ / saved.name)) {
      if (calls >= saved.after && !deleting) return saved.name + " was taken and is gone";
      continue;
    }
    std::string what = opens(saved);
    // Of a folder that is being deleted files may be missing. What is there is as it was.
    const bool missing =
        what.find("corrupt") == std::string::npos && what.find("numbers") == std::string::npos;
    if (!what.empty() && !(deleting && missing)) return what;
  }
  return part_that_nobody_names();
}

std::string Cut::opens(const SavedInCut& saved) {
  try {
    reader().load(root_ / saved.name);
  } catch (const engine::CheckpointError& error) {
    return fmt::format("{} does not open: {}", saved.name, error.what());
  }
  const std::vector<float> found = toy_contents(reader());
  const bool same =
      std::memcmp(found.data(), saved.contents.data(), saved.contents.size() * sizeof(float)) == 0;
  return same ? "" : fmt::format("{} opens with other numbers", saved.name);
}

/// The next saves remove what was not complete. A part that stays then is a checkpoint's, or the next start
/// of a run names it: else it would take room for ever.
std::string Cut::part_that_nobody_names() const {
  if (GetParam().paths == 1) return "";
  std::set<fs::path> known;
  for (const SavedInCut& saved : saved_) {
    try {
      engine::remove_save(root_ / (saved.name + ".partial"));
    } catch (const engine::CheckpointError& error) {
      return error.what();
    }
    for (const fs::path& part : parts_of(root_ / saved.name)) known.insert(part);
  }
  for (const fs::path& base : nvme()) {
    if (!fs::exists(base)) continue;
    const std::vector<std::string> told = io::orphans(base);
    for (const auto& entry : fs::directory_iterator(base)) {
      const std::string path = entry.path().string();
      const bool named = std::ranges::any_of(
          told, [&](const std::string& words) { return words.find(path) != std::string::npos; });
      if (!named && !known.contains(entry.path())) return "nobody names " + path;
    }
  }
  return "";
}

Engine& Cut::reader() {
  if (reader_ == nullptr) {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.threads = 1;
    config.chunk_elements = 2048;
    reader_ = std::make_unique<Engine>(units(), config, make_resources(units(), config, {}));
  }
  return *reader_;
}

}  // namespace overspill::testing
