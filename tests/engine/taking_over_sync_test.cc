// Slabs are taken over only after the file system was synced: a checkpoint whose removal is not on the disk
// would be there again after a power cut, with bytes that were given to others.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <vector>

#include "engine/resources.h"
#include "tests/engine/file_calls.h"
#include "tests/engine/toy_model.h"
#include "tests/test_folders.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;

class Syncs final : public FileWatcher {
 public:
  explicit Syncs(int os_error) : os_error_(os_error) {}
  int failure_of(const FileCall& call) override {
    if (call.kind == FileCall::Kind::sync_all) return os_error_;
    linked_ =
        linked_ || (call.kind == FileCall::Kind::link && call.other.find("overspill-") != std::string::npos);
    return 0;
  }
  void done(const FileCall& call, std::span<const std::byte> /*data*/) override {
    if (call.kind == FileCall::Kind::sync_all && !linked_) synced_first_ = true;
  }
  bool linked() const { return linked_; }
  bool synced_first() const { return synced_first_; }

 private:
  int os_error_;
  bool linked_ = false;
  bool synced_first_ = false;
};

TEST(TakingOverAfterASync, NothingIsTakenWithoutIt) {
  const fs::path folder = empty_folder(fs::temp_directory_path(), "synced");
  engine::Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {folder};
  config.chunk_elements = 4096;
  config.placement = engine::Placement::nvme;
  const auto make = [&] {
    auto engine = std::make_unique<engine::Engine>(
        toy_units(), config, make_resources(toy_units(), config, {"host", "threads", 1}));
    toy_load(*engine);
    return engine;
  };
  {
    const auto engine = make();
    toy_step(*engine, 0, 1, 0);
    engine->save(folder / "one", "{}");
  }
  config.take_over = {folder / "one"};
  for (const int os_error : {0, EIO}) {
    Syncs syncs(os_error);
    const WatchedFiles watched(syncs);
    const auto engine = make();
    engine->load(folder / "one");
    EXPECT_EQ(syncs.linked(), os_error == 0);
    EXPECT_EQ(syncs.synced_first(), os_error == 0);
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace overspill::testing
