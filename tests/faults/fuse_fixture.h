// A file system that a test lets fail as it likes: fuse_layer, mounted for the length of a test.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/vfs.h>

#include <memory>
#include <string>

#include "tests/faults/fuse_faults.h"
#include "tests/faults/mounts.h"

namespace overspill::testing {

inline constexpr int64_t kAll = int64_t{1} << 60;

class Fuse : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef OVERSPILL_FUSE_LAYER
    GTEST_SKIP() << "built without libfuse3 (tools/setup --test installs it)";
#else
    if (const std::string why = own_mounts(); !why.empty()) GTEST_SKIP() << why;
    if (::access("/dev/fuse", R_OK | W_OK) != 0) GTEST_SKIP() << "/dev/fuse: " << std::strerror(errno);
    file_ = ::memfd_create("faults", 0);
    ASSERT_GE(file_, 0);
    ASSERT_EQ(::ftruncate(file_, sizeof(FuseFaults)), 0);
    faults_ = new (map_fuse_faults(file_)) FuseFaults;
    prepare(*faults_);
    fs::create_directory(point_.beside("backing"));
    const std::string backing = point_.beside("backing"), number = std::to_string(file_), here = root();
    layer_ = ::fork();
    if (layer_ == 0) {
      // A test that a sanitizer ends leaves no layer behind, which would hold ctest's pipe open for ever.
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::execl(OVERSPILL_FUSE_LAYER, "fuse_layer", backing.c_str(), number.c_str(), here.c_str(), nullptr);
      ::_exit(127);
    }
    bool ended = false;
    const bool mounted = eventually([&] {
      int status = 0;
      ended = ::waitpid(layer_, &status, WNOHANG) == layer_;
      return ended || is_mounted();
    });
    if (ended) layer_ = -1;
    if (!mounted || ended) GTEST_SKIP() << "FUSE cannot be mounted here (a container may refuse it)";
#endif
  }

  void TearDown() override {
    if (faults_ != nullptr) faults_->hang = false;
    kill_layer();
    if (faults_ != nullptr) ::munmap(faults_, sizeof(FuseFaults));
    if (file_ >= 0) ::close(file_);
  }

  /// Before it is mounted.
  virtual void prepare(FuseFaults&) {}

  bool is_mounted() const {
    struct statfs status {};
    return ::statfs(root().c_str(), &status) == 0 && status.f_type == 0x65735546;
  }

  void kill_layer() {
    if (layer_ <= 0) return;
    ::kill(layer_, SIGKILL);
    int status = 0;
    ::waitpid(layer_, &status, 0);
    layer_ = -1;
  }

  fs::path root() const {
    return point_.path();
  }

  std::unique_ptr<engine::Engine> trained(int steps, const std::string& backend = "auto") {
    auto engine = make_engine({.nvme = root(), .backend = backend});
    toy_load(*engine);
    for (int step = 0; step < steps; ++step) toy_step(*engine, step, 1, 0);
    engine->synchronize();
    return engine;
  }

  /// From now on these operations fail, or the next of them only.
  void fail(FuseOperation operation, int os_error, int64_t let_through = 0, int64_t failures = kAll) {
    faults_->os_error = os_error;
    faults_->failures = failures;
    faults_->let_through = let_through;
    faults_->operations = static_cast<uint32_t>(operation);
  }
  void heal() {
    faults_->operations = 0;
  }

  Mountpoint point_;
  int file_ = -1;
  pid_t layer_ = -1;
  FuseFaults* faults_ = nullptr;
};

}  // namespace overspill::testing
