// Another process truncates, overwrites or removes files of the store or of a checkpoint: a typed error that
// names the file, never a wrong number.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>

#include "tests/faults/mounts.h"

namespace overspill::testing {
namespace {

enum class Harm : uint8_t { truncate, shorten, overwrite, remove };

/// In another process, as the harm comes from there.
void harm(const fs::path& file, Harm how) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    bool done = false;
    if (how == Harm::truncate) done = ::truncate(file.c_str(), 0) == 0;
    if (how == Harm::shorten) done = ::truncate(file.c_str(), 4096) == 0;  // in the middle of what is in use
    if (how == Harm::remove) done = ::unlink(file.c_str()) == 0;
    if (how == Harm::overwrite) {
      const int fd = ::open(file.c_str(), O_WRONLY | O_CLOEXEC);
      struct stat status {};
      done = fd >= 0 && ::fstat(fd, &status) == 0;
      static const char kGarbage[4096] = {'g', 'a', 'r', 'b', 'a', 'g', 'e'};
      for (off_t at = 0; done && at < status.st_size; at += sizeof kGarbage) {
        const auto bytes = static_cast<size_t>(std::min<off_t>(sizeof kGarbage, status.st_size - at));
        done = ::pwrite(fd, kGarbage, bytes, at) == static_cast<ssize_t>(bytes);
      }
    }
    ::_exit(done ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  ASSERT_EQ(status, 0) << file;
}

std::vector<fs::path> slabs_below(const fs::path& folder) {
  std::vector<fs::path> slabs;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("slab-") && name.ends_with(".bin")) slabs.push_back(entry.path());
  }
  return slabs;
}

struct Case {
  const char* name;
  Harm how;
  std::vector<std::string> message;
};

class Behind : public ::testing::TestWithParam<Case> {
 protected:
  ScratchFolder scratch_;
  Shadow shadow_;
};

TEST_P(Behind, ALiveSlabIsHarmed) {
  const Case& now = GetParam();
  for (const char* backend : {"auto", "threads"}) {
    const fs::path nvme = scratch_.path() / backend;
    fs::create_directory(nvme);
    // The checkpoint's own copy lies where the harm does not reach: a hard link would be harmed with the
    // slab.
    const auto engine = make_engine({.nvme = nvme, .backend = backend});
    toy_load(*engine);
    for (int step = 0; step < 2; ++step) toy_step(*engine, step, 1, 0);
    engine->save(nvme / "two", "{}");
    const fs::path copy = scratch_.path() / (std::string(backend) + " copy");
    ASSERT_EQ(run_program({"cp", "-r", (nvme / "two").string(), copy.string()}), 0);
    for (int step = 2; step < 4; ++step) toy_step(*engine, step, 1, 0);
    engine->synchronize();
    const std::vector<fs::path> slabs = slabs_below(nvme / "overspill-faults");
    ASSERT_FALSE(slabs.empty());
    for (const fs::path& slab : slabs) harm(slab, now.how);

    const std::string message = train_until_failure(*engine, 3);
    if (now.how == Harm::remove) {  // the open file is as good as before; a link to it cannot be made
      EXPECT_EQ(message, "");
      EXPECT_EQ(toy_contents(*engine), Shadow().at(7));
      expect_says(refusal_of([&] { engine->save(nvme / "seven", "{}"); }),
                  {"link", nvme.string(), "errno 2"});
      EXPECT_FALSE(fs::exists(nvme / "seven"));
      EXPECT_FALSE(fs::exists(nvme / "seven.partial"));
      EXPECT_EQ(toy_step(*engine, 7, 1, 0).result.step, 8);
    } else {
      expect_says(message, now.message);
      expect_says(message, {slabs.front().parent_path().string(), "read", "offset", "two"});
      EXPECT_THROW(toy_contents(*engine), engine::EngineFailed);
      EXPECT_THROW(engine->save(nvme / "never", "{}"), engine::EngineFailed);
      EXPECT_FALSE(fs::exists(nvme / "never"));
      // The linked checkpoint is refused, the copy is whole.
      EXPECT_NE(refusal_of([&] { contents_of(nvme / "two"); }), "");
    }
    EXPECT_EQ(contents_of(copy), Shadow().at(2));
  }
}

TEST_P(Behind, ACheckpointIsHarmed) {
  const Case& now = GetParam();
  const auto engine = make_engine({.nvme = scratch_.path(), .placement = engine::Placement::half});
  toy_load(*engine);
  for (int step = 0; step < 2; ++step) toy_step(*engine, step, 1, 0);
  const fs::path good = scratch_.path() / "two";
  engine->save(good, "{}");
  for (int step = 2; step < 4; ++step) toy_step(*engine, step, 1, 0);
  const std::vector<float> before = toy_contents(*engine);
  ASSERT_EQ(before, shadow_.at(4));

  int harmed = 0;
  for (const std::string& name : names_in(good)) {
    const fs::path folder = scratch_.path() / "harmed";
    ASSERT_EQ(run_program({"cp", "-r", good.string(), folder.string()}), 0);
    harm(folder / name, now.how);
    if (name.starts_with("shared-")) {  // means something to the run that made it, and to no reader
      EXPECT_EQ(contents_of(folder), Shadow().at(2));
      fs::remove_all(folder);
      continue;
    }
    const std::string message = refusal_of([&] { engine->load(folder); });
    expect_says(message, {folder.string(), name, "; "});
    expect_says(refusal_of([&] { engine::verify_checkpoint(folder, nullptr, nullptr); }),
                {folder.string(), name, "; "});
    EXPECT_EQ(toy_contents(*engine), before) << "a refused checkpoint changed something";
    fs::remove_all(folder);
    ++harmed;
  }
  EXPECT_GE(harmed, 3) << "a slab, resident.bin and the manifest";
  EXPECT_EQ(toy_step(*engine, 4, 1, 0).result.step, 5);
  EXPECT_EQ(toy_contents(*engine), shadow_.at(5));
  engine->load(good);
  EXPECT_EQ(toy_contents(*engine), Shadow().at(2));
}

INSTANTIATE_TEST_SUITE_P(
    Harms, Behind,
    ::testing::Values(Case{"truncated", Harm::truncate, {"file too short", "resume"}},
                      Case{"shortened", Harm::shorten, {"resume"}},
                      Case{"overwritten", Harm::overwrite, {"corrupt data", "checksum", "resume"}},
                      Case{"removed", Harm::remove, {}}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(BehindFolder, OneOfARunThatWasKilledBeforeItHadALockGoesAtTheNextStart) {
  const ScratchFolder scratch;
  ASSERT_EQ(::mkdir((scratch.path() / "overspill-killed-at-once").c_str(), 0700), 0);  // as a store makes it
  fs::create_directory(scratch.path() / "overspill-somebody-begins");
  fs::permissions(scratch.path() / "overspill-somebody-begins", fs::perms(0755));
  fs::create_directory(scratch.path() / "overspill-of-somebody");
  std::ofstream(scratch.path() / "overspill-of-somebody" / "notes") << "not ours";
  const auto engine = make_engine({.nvme = scratch.path()});
  EXPECT_FALSE(fs::exists(scratch.path() / "overspill-killed-at-once"));
  EXPECT_TRUE(fs::exists(scratch.path() / "overspill-somebody-begins"));
  EXPECT_TRUE(fs::exists(scratch.path() / "overspill-of-somebody" / "notes"));
}

TEST(BehindFolder, TheJobsFolderIsRemovedWhileARunLives) {
  const ScratchFolder scratch;
  {
    const auto engine = make_engine({.nvme = scratch.path()});
    toy_load(*engine);
    toy_step(*engine, 0, 1, 0);
    fs::remove_all(scratch.path() / "overspill-faults");
    toy_step(*engine, 1, 1, 0);
    expect_says(refusal_of([&] { engine->save(scratch.path() / "two", "{}"); }), {"overspill-faults"});
    EXPECT_EQ(toy_contents(*engine), Shadow().at(2));
  }
  EXPECT_TRUE(names_in(scratch.path()).empty());
}

}  // namespace
}  // namespace overspill::testing
