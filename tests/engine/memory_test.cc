#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/memory/budget.h"
#include "engine/memory/host_memory.h"
#include "engine/memory/linked_memory.h"
#include "kernels/host_device.h"
#include "kernels/host_pages.h"
#include "kernels/simulated_device.h"

namespace overspill::engine {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// Physical memory behind all mappings of the NaN file: each page counted once, however often it is mapped.
int64_t nan_file_bytes() {
  std::ifstream smaps("/proc/self/smaps");
  int64_t bytes = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.find(" r") != std::string::npos && line.find('-') < line.find(' ')) {
      inside = line.find("memfd:overspill-nan") != std::string::npos;
    }
    if (inside && line.starts_with("Pss:")) bytes += std::stoll(line.substr(4)) * 1024;
  }
  return bytes;
}

/// What the kernel says about the mapping that begins at this address: "default", "prefer:0" and so on; empty
/// where it does not say.
std::string numa_policy(const std::byte* data) {
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string address, policy;
    words >> address >> policy;
    if (std::stoull(address, nullptr, 16) == reinterpret_cast<uintptr_t>(data)) return policy;
  }
  return {};
}

TEST(LinkedMemory, IsPinnedAndNextToItsDevice) {
  Budget budget("host", 64 * kMiB);
  const auto near = kernels::make_simulated_device({.numa_node = 0});
  const LinkedMemory memory(*near, budget, 4 * kMiB, "linked");
  const kernels::DeviceMemory there = near->allocate(4096);
  const auto stream = near->make_stream();
  stream->copy_to_host(memory.data() + kMiB, there.data(), 4096);
  stream->record().wait();
  EXPECT_EQ(near->unpinned_copies(), 0);
  const std::string policy = numa_policy(memory.data());
  if (policy.empty()) GTEST_SKIP() << "this kernel does not say where memory lies (/proc/self/numa_maps)";
  EXPECT_TRUE(policy.starts_with("prefer")) << policy;
  EXPECT_EQ(numa_policy(LinkedMemory(*near, budget, 4 * kMiB, "another").data()), policy);
}

/// Pages of it that are in memory.
int64_t resident_pages(std::span<std::byte> memory) {
  std::vector<unsigned char> pages((memory.size() + 4095) / 4096);
  EXPECT_EQ(::mincore(memory.data(), memory.size(), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

TEST(LinkedMemory, IsThereBeforeItIsPinned) {
  Budget budget("host", 512 * kMiB);
  const auto device = kernels::make_simulated_device();
  for (const int64_t bytes : {int64_t{5000}, 4 * kMiB, 200 * kMiB + 4096}) {
    const LinkedMemory memory(*device, budget, bytes, "linked");
    EXPECT_EQ(resident_pages(memory.span()), (bytes + 4095) / 4096);
    EXPECT_EQ(std::count(memory.span().begin(), memory.span().end(), std::byte{0}), bytes);
  }
  const auto host = kernels::make_host_device();
  const LinkedMemory untouched(*host, budget, 4 * kMiB, "ordinary");
  EXPECT_EQ(resident_pages(untouched.span()), 0);
}

TEST(LinkedMemory, IsOrdinaryWhereNobodyKnowsBetter) {
  Budget budget("host", 64 * kMiB);
  const auto no_such_node = kernels::make_simulated_device({.numa_node = 4711});
  const auto unknown = kernels::make_simulated_device();
  const auto host = kernels::make_host_device();
  for (kernels::Device* device : {static_cast<kernels::Device*>(no_such_node.get()),
                                  static_cast<kernels::Device*>(unknown.get()), host.get()}) {
    const LinkedMemory memory(*device, budget, 4 * kMiB, "linked");
    std::fill_n(memory.data(), memory.bytes(), std::byte{1});
    const std::string policy = numa_policy(memory.data());
    EXPECT_TRUE(policy.empty() || policy == "default") << policy;
    EXPECT_EQ(LinkedMemory(*device, budget, 0, "empty").data(), nullptr);
  }
}

TEST(Budget, ChargesAndRefunds) {
  Budget budget("host", 100);
  {
    Reservation first = budget.reserve(60, "states");
    Reservation second = budget.reserve(40, "staging");
    EXPECT_EQ(budget.used_bytes(), 100);
    Reservation moved(std::move(first));
    EXPECT_EQ(moved.bytes(), 60);
    EXPECT_EQ(first.bytes(), 0);
    second = std::move(moved);  // what it held is refunded at once
    EXPECT_EQ(budget.used_bytes(), 60);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
  EXPECT_EQ(budget.peak_bytes(), 100);
}

TEST(Budget, MessageHasTheValuesThatDecidedIt) {
  Budget budget("host", 100);
  const Reservation held = budget.reserve(70, "states");
  try {
    (void)budget.reserve(31, "the gradient ring");
    FAIL() << "31 more bytes fit into 30";
  } catch (const BudgetError& error) {
    const std::string what = error.what();
    for (const char* part :
         {"host", "31 bytes", "the gradient ring", "70 of", "100 bytes", "raise budget.host", "1 bytes"}) {
      EXPECT_NE(what.find(part), std::string::npos) << part << " in: " << what;
    }
  }
  EXPECT_EQ(budget.used_bytes(), 70);
  EXPECT_EQ(budget.peak_bytes(), 70);
  EXPECT_THROW((void)budget.reserve(std::numeric_limits<int64_t>::max(), "overflow"), BudgetError);
  EXPECT_THROW((void)budget.reserve(-1, "negative"), BudgetError);
  EXPECT_THROW(Budget("host", -1), BudgetError);
  EXPECT_EQ(budget.used_bytes(), 70);
}

TEST(Budget, NeverPassedByThreads) {
  Budget budget("host", 10);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        try {
          const Reservation held = budget.reserve(4, "a thread");
          EXPECT_LE(budget.used_bytes(), 10);
        } catch (const BudgetError&) {
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(budget.used_bytes(), 0);
  EXPECT_LE(budget.peak_bytes(), 8);
}

TEST(HostMemory, IsZeroAlignedChargedAndMovable) {
  Budget budget("host", 16 * kMiB);
  HostMemory memory(budget, 3 * kMiB + 1, "a test");
  EXPECT_EQ(memory.bytes(), 3 * kMiB + 1);
  EXPECT_EQ(budget.used_bytes(), 3 * kMiB + 4096);  // what the kernel takes, not what was asked for
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, 0u);
  for (std::byte b : memory.span()) ASSERT_EQ(b, std::byte{0});
  memory.data()[3 * kMiB] = std::byte{7};

  HostMemory moved(std::move(memory));
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_EQ(moved.data()[3 * kMiB], std::byte{7});
  HostMemory other(budget, 4096, "another");
  other = std::move(moved);
  EXPECT_EQ(other.data()[3 * kMiB], std::byte{7});
  EXPECT_EQ(budget.used_bytes(), 3 * kMiB + 4096);
  other = HostMemory();
  EXPECT_EQ(budget.used_bytes(), 0);
}

/// A slot of the ring in 4 KiB pages is a transfer of 512 pieces: a tenth of the disk's speed, over a ring of
/// eight.
TEST(HostMemory, BeginsWithAHugePage) {
  Budget budget("host", 64 * kMiB);
  std::vector<HostMemory> held;
  for (int64_t bytes : {2 * kMiB, 2 * kMiB + 1, 3 * kMiB + 4096, 5 * kMiB, 7 * kMiB + 4096}) {
    held.emplace_back(budget, bytes, "a test");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(held.back().data()) % static_cast<uintptr_t>(2 * kMiB), 0u)
        << bytes;
    std::memset(held.back().data(), 1, static_cast<size_t>(bytes));
  }
}

TEST(HostMemory, RefusesWhatDoesNotFit) {
  Budget budget("host", kMiB);
  EXPECT_THROW(HostMemory(budget, 2 * kMiB, "too much"), BudgetError);
  EXPECT_THROW(HostMemory(budget, -1, "negative"), BudgetError);
  EXPECT_EQ(HostMemory(budget, 0, "nothing").data(), nullptr);
  EXPECT_EQ(budget.used_bytes(), 0);
  Budget endless("host", std::numeric_limits<int64_t>::max());
  EXPECT_THROW(HostMemory(endless, int64_t{1} << 60, "more than addresses"), std::bad_alloc);
  EXPECT_EQ(endless.used_bytes(), 0);
}

TEST(HostMemory, IsNotCopiedByFork) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer maps memory of its own where the child has none";
#endif
  Budget budget("host", 4 * kMiB);
  HostMemory memory(budget, 4 * kMiB, "not for children");
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {  // the kernel itself says whether the child has the page
    const ssize_t wrote = ::write(ends[1], memory.data(), 1);
    ::_exit(wrote == -1 && errno == EFAULT ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child could read it";
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(NanPages, ReadAsNanInFullLength) {
  for (int64_t bytes : {int64_t{1}, int64_t{4096}, 2 * kMiB, 2 * kMiB + 4096, 5 * kMiB + 123, 33 * kMiB}) {
    NanPages pages(bytes);
    ASSERT_GE(pages.bytes(), bytes);
    for (int64_t i = 0; i < pages.bytes(); i += 4) {
      float value;
      std::memcpy(&value, pages.data() + i, sizeof value);
      ASSERT_TRUE(std::isnan(value)) << "byte " << i << " of " << bytes;
    }
  }
  EXPECT_EQ(NanPages(0).data(), nullptr);
  EXPECT_THROW(NanPages(-1), std::bad_alloc);
}

TEST(NanPages, AWriteStaysWhereItWasMade) {
  NanPages first(8 * kMiB), second(8 * kMiB);
  first.data()[100] = std::byte{0};
  EXPECT_EQ(first.data()[100], std::byte{0});
  EXPECT_EQ(first.data()[2 * kMiB + 100], std::byte{0xFF});  // the same page of the file
  EXPECT_EQ(second.data()[100], std::byte{0xFF});
  EXPECT_EQ(NanPages(kMiB).data()[100], std::byte{0xFF});
}

TEST(NanPages, CostLittlePhysicalMemory) {
  NanPages pages(4096 * kMiB);
  uint64_t sum = 0;
  for (int64_t i = 0; i < 256 * kMiB; i += 4096) sum += static_cast<uint64_t>(pages.data()[i]);
  EXPECT_EQ(sum, 65536u * 255);
  const int64_t physical = nan_file_bytes();
  EXPECT_GT(physical, 0);
  EXPECT_LE(physical, 64 * kMiB);  // the largest window; 256 MiB were read, 4096 mapped
}

/// How many of the memory's pages, which are whole, take memory.
int64_t pages_there(std::span<std::byte> memory) {
  std::vector<unsigned char> there(memory.size() / 4096);
  EXPECT_EQ(::mincore(memory.data(), memory.size(), there.data()), 0);
  return std::count_if(there.begin(), there.end(), [](unsigned char page) { return (page & 1) != 0; });
}

TEST(HostPages, ArePopulatedWhereTheyHaveNone) {
  const kernels::HostPages pages(int64_t{64} * 4096, kernels::PageSize::small);
  const std::span<std::byte> all = pages.span();
  all[10 * 4096 + 5] = std::byte{7};
  ASSERT_EQ(pages_there(all), 1);
  kernels::populate(all.subspan(8 * 4096 + 100, size_t{16} * 4096));  // of 17 pages
  EXPECT_EQ(pages_there(all), 17);
  EXPECT_EQ(all[10 * 4096 + 5], std::byte{7});
  kernels::populate({});
  EXPECT_EQ(pages_there(all), 17);
}

}  // namespace
}  // namespace overspill::engine
