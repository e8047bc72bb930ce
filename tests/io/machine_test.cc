// What the kernel and the drive tell about a path: its disks, their NUMA node, O_DIRECT's alignment, wear.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <array>
#include <fstream>
#include <string>
#include <vector>

#include "io/block_device.h"
#include "io/direct_alignment.h"
#include "io/drive_wear.h"
#include "io/unique_fd.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

// A /sys of our own.
class FakeSys {
 public:
  FakeSys() {
    for (const char* folder : {"block", "class/block", "class/nvme", "dev/block"})
      fs::create_directories(path() / folder);
  }
  const fs::path& path() const { return folder_.path(); }

  /// A block device in `devices/<where>`; a partition where `disk` says so.
  void add(const std::string& where, bool partition = false) {
    const fs::path device = path() / "devices" / where;
    fs::create_directories(device / (partition ? "" : "slaves"));
    if (partition) write(where + "/partition", "1");
    fs::create_directory_symlink(device, path() / "class/block" / device.filename());
    if (!partition) fs::create_directory_symlink(device, path() / "block" / device.filename());
  }
  void write(const std::string& where, const std::string& text) {
    fs::create_directories((path() / "devices" / where).parent_path());
    std::ofstream(path() / "devices" / where) << text << "\n";
  }
  void slave(const std::string& device, const std::string& below) {
    fs::create_directory_symlink(fs::canonical(path() / "class/block" / below),
                                 path() / "devices" / device / "slaves" / below);
  }
  /// Whatever lies in `folder` is on the device.
  void holds(const fs::path& folder, const std::string& device) {
    struct stat info {};
    ASSERT_EQ(::stat(folder.c_str(), &info), 0);
    fs::create_directory_symlink(
        fs::canonical(path() / "class/block" / device),
        path() / "dev/block" / fmt::format("{}:{}", major(info.st_dev), minor(info.st_dev)));
  }

 private:
  ScratchFolder folder_;
};

TEST(BlockDevice, APartitionLeadsToItsDisk) {
  FakeSys sys;
  sys.add("pci0/nvme/nvme0/nvme0n1");
  sys.add("pci0/nvme/nvme0/nvme0n1/nvme0n1p2", true);
  EXPECT_EQ(disks_below("nvme0n1p2", sys.path()), Names{"nvme0n1"});
  sys.holds(sys.path(), "nvme0n1p2");
  EXPECT_EQ(disks_of(sys.path(), sys.path()), Names{"nvme0n1"});
}

TEST(BlockDevice, DeviceMapperAndLoopLeadToWhatIsBelow) {
  FakeSys sys;
  sys.add("pci0/ata1/sda");
  sys.add("pci0/ata1/sda/sda1", true);
  sys.add("pci0/ata2/sdb");
  sys.add("virtual/md0");
  sys.slave("virtual/md0", "sda1");
  sys.slave("virtual/md0", "sdb");
  sys.add("virtual/dm-0");
  sys.slave("virtual/dm-0", "md0");
  EXPECT_EQ(disks_below("dm-0", sys.path()), (Names{"sda", "sdb"}));
  sys.add("virtual/loop0");
  sys.write("virtual/loop0/loop/backing_file", sys.path().string());
  sys.holds(sys.path(), "dm-0");
  EXPECT_EQ(disks_below("loop0", sys.path()), (Names{"sda", "sdb"}));
}

TEST(BlockDevice, ACircleEnds) {
  FakeSys sys;
  sys.add("virtual/dm-0");
  sys.add("virtual/dm-1");
  sys.slave("virtual/dm-0", "dm-1");
  sys.slave("virtual/dm-1", "dm-0");
  EXPECT_EQ(disks_below("dm-0", sys.path()), Names{});
}

TEST(BlockDevice, UnknownStaysUnknown) {
  FakeSys sys;
  EXPECT_EQ(disks_below("sdz", sys.path()), Names{});
  EXPECT_EQ(disks_of(sys.path(), sys.path()), Names{});
  EXPECT_EQ(disks_of("/not-there", sys.path()), Names{});
  EXPECT_EQ(numa_node_of({}, sys.path()), std::nullopt);
  EXPECT_EQ(numa_node_of({"sdz"}, sys.path()), std::nullopt);
  EXPECT_EQ(rotational("sdz", sys.path()), std::nullopt);
}

TEST(BlockDevice, TheNodeIsTheNearestAboveTheDisk) {
  FakeSys sys;
  sys.add("pci0/ata1/sda");
  sys.write("pci0/numa_node", "1");
  sys.add("pci1/ata2/sdb");
  sys.write("pci1/numa_node", "0");
  sys.add("virtual/sdc");
  sys.write("virtual/numa_node", "-1");
  sys.write("pci0/ata1/sda/queue/rotational", "1");
  EXPECT_EQ(numa_node_of({"sda"}, sys.path()), 1);
  EXPECT_EQ(numa_node_of({"sda", "sdb"}, sys.path()), std::nullopt) << "near two nodes";
  EXPECT_EQ(numa_node_of({"sdc"}, sys.path()), std::nullopt) << "-1 is not known";
  EXPECT_EQ(rotational("sda", sys.path()), true);
}

TEST(BlockDevice, NvmeMultipathAsksItsControllers) {
  FakeSys sys;
  sys.add("virtual/nvme-subsystem/nvme-subsys0/nvme0n1");
  for (const char* controller : {"nvme0", "nvme1"}) {
    const fs::path folder = sys.path() / "devices/pci0" / controller;
    fs::create_directories(folder);
    fs::create_directory_symlink(folder, sys.path() / "class/nvme" / controller);
    fs::create_directory_symlink(folder,
                                 sys.path() / "devices/virtual/nvme-subsystem/nvme-subsys0" / controller);
  }
  sys.write("pci0/numa_node", "1");
  EXPECT_EQ(nvme_controllers("nvme0n1", sys.path()), (Names{"nvme0", "nvme1"}));
  EXPECT_EQ(numa_node_of({"nvme0n1"}, sys.path()), 1);
  sys.add("pci0/nvme2/nvme2n1");
  EXPECT_EQ(nvme_controllers("nvme2n1", sys.path()), Names{"nvme2"});
  EXPECT_EQ(nvme_controllers("sda", sys.path()), Names{});
}

// Two nodes, a disk at the second.
constexpr const char* kTwoNodes = R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x3" complete_cpuset="0x3" allowed_cpuset="0x3" nodeset="0x3" complete_nodeset="0x3" allowed_nodeset="0x3" gp_index="1">
  <object type="Package" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="2">
   <object type="NUMANode" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="3" local_memory="1073741824"/>
   <object type="PU" os_index="0" cpuset="0x1" complete_cpuset="0x1" nodeset="0x1" complete_nodeset="0x1" gp_index="4"/>
  </object>
  <object type="Package" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x2" complete_nodeset="0x2" gp_index="5">
   <object type="NUMANode" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x2" complete_nodeset="0x2" gp_index="6" local_memory="1073741824"/>
   <object type="PU" os_index="1" cpuset="0x2" complete_cpuset="0x2" nodeset="0x2" complete_nodeset="0x2" gp_index="7"/>
   <object type="Bridge" gp_index="8" bridge_type="0-1" depth="0" bridge_pci="0000:[00-03]">
    <object type="PCIDev" gp_index="9" pci_busid="0000:01:00.0" pci_type="0108 [8086:0953] [8086:3702] 01" pci_link_speed="3.938462">
     <object type="OSDev" gp_index="10" name="nvme0n1" subtype="Disk" osdev_type="0"/>
    </object>
   </object>
  </object>
  <object type="Bridge" gp_index="11" bridge_type="0-1" depth="0" bridge_pci="0000:[10-13]">
   <object type="PCIDev" gp_index="12" pci_busid="0000:11:00.0" pci_type="0108 [8086:0953] [8086:3702] 01" pci_link_speed="3.938462">
    <object type="OSDev" gp_index="13" name="nvme1n1" subtype="Disk" osdev_type="0"/>
   </object>
  </object>
 </object>
</topology>
)";

TEST(BlockDevice, HwlocTellsTheNode) {
  EXPECT_EQ(numa_node_in_topology("nvme0n1", kTwoNodes), 1);
  EXPECT_EQ(numa_node_in_topology("nvme1n1", kTwoNodes), std::nullopt) << "as near to one as to the other";
  EXPECT_EQ(numa_node_in_topology("sda", kTwoNodes), std::nullopt);
  EXPECT_EQ(numa_node_in_topology("sda", "no xml"), std::nullopt);
}

TEST(BlockDevice, BindingToANodeThatIsNotThereIsHarmless) {
  const NearNode nowhere(std::nullopt);
  const NearNode far(1000);
}

TEST(DirectAlignment, BlocksMustDo) {
  EXPECT_EQ(refusal_of({512, 512}), "");
  EXPECT_EQ(refusal_of({4, kBlockBytes}), "");
  EXPECT_FALSE(refusal_of({0, 0}).empty());
  EXPECT_TRUE(contains(refusal_of({512, 16384}), "16384"));
  EXPECT_TRUE(contains(refusal_of({8192, 512}), "8192"));
}

TEST(DirectAlignment, TheKernelsNumbersFitItsBehaviour) {
  const ScratchFolder folder;
  const UniqueFd fd(::open((folder.path() / "file").c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600));
  if (!fd) GTEST_SKIP() << "O_DIRECT is refused here";
  const auto alignment = direct_alignment_of(fd.get());
  if (!alignment || alignment->offset_bytes == 0) GTEST_SKIP() << "this kernel or file system does not tell";
  AlignedMemory memory(kBlockBytes * 2);
  const auto bytes = static_cast<size_t>(alignment->offset_bytes);
  EXPECT_EQ(::pwrite(fd.get(), memory.data(), bytes, 0), alignment->offset_bytes);
  EXPECT_EQ(::pwrite(fd.get(), memory.data(), bytes, alignment->offset_bytes / 2), -1);
  EXPECT_EQ(direct_alignment_of(-1), std::nullopt);
}

TEST(DriveWear, ReadsTheSmartLog) {
  std::array<std::byte, 512> page{};
  page[5] = std::byte{12};
  page[48] = std::byte{0x10};  // 0x200010 units of 512,000 bytes
  page[50] = std::byte{0x20};
  const auto wear = parse_smart_log(page);
  ASSERT_TRUE(wear);
  EXPECT_EQ(wear->percentage_used, 12);
  EXPECT_EQ(wear->written_bytes, 0x200010LL * 512000);
  page[60] = std::byte{1};
  EXPECT_FALSE(parse_smart_log(page)) << "more than can be";
  EXPECT_FALSE(parse_smart_log(std::span(page).first(511)));
}

TEST(DriveWear, SaysWhyNothingIsKnown) {
  std::string why;
  EXPECT_FALSE(read_drive_wear("sda", why));
  EXPECT_TRUE(contains(why, "sda is no NVMe drive")) << why;
  EXPECT_FALSE(read_drive_wear("nvme999n1", why));
  EXPECT_TRUE(contains(why, "nvme999n1: No such file")) << why;
}

}  // namespace
}  // namespace overspill::io
