// Which disks a folder lies on, and near which NUMA node they are.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace overspill::io {

/// Whole disks below a folder, as the kernel names them ("nvme0n1", "sda"): through partitions, loop devices,
/// device mapper and md. Sorted; empty where it cannot be told (tmpfs, overlay, NFS). `sys`: for tests.
std::vector<std::string> disks_of(const std::filesystem::path& folder,
                                  const std::filesystem::path& sys = "/sys");
/// Of the block device with this name below /sys.
std::vector<std::string> disks_below(const std::string& name, const std::filesystem::path& sys = "/sys");

/// The controllers of an NVMe disk, more than one with multipath; empty for others.
std::vector<std::string> nvme_controllers(const std::string& disk, const std::filesystem::path& sys = "/sys");

/// Whether /sys says that a disk turns.
std::optional<bool> rotational(const std::string& disk, const std::filesystem::path& sys = "/sys");

/// Near which node the disks are: hwloc's word (its OS devices), else that of /sys. Empty where unknown, or
/// where they are near several.
std::optional<int> numa_node_of(const std::vector<std::string>& disks,
                                const std::filesystem::path& sys = "/sys");

/// For tests: hwloc's word alone, over a topology given as XML.
std::optional<int> numa_node_in_topology(const std::string& disk, const std::string& hwloc_xml);

/// While it lives, this thread and the threads it starts run on the node's cores. Does nothing for an unknown
/// node, on a machine of one node, or where the kernel refuses.
class NearNode {
 public:
  explicit NearNode(std::optional<int> node);
  ~NearNode();
  NearNode(const NearNode&) = delete;
  NearNode& operator=(const NearNode&) = delete;

 private:
  struct Binding;
  std::unique_ptr<Binding> binding_;  // null: nothing was bound
};

}  // namespace overspill::io
