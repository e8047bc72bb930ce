#include "io/block_device.h"

#include <fmt/format.h>
#include <hwloc.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <set>
#include <system_error>

namespace overspill::io {
namespace {

namespace fs = std::filesystem;
constexpr int kDepthMax = 8;  // dm on md on loop …; a circle ends here

std::vector<std::string> entries_of(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<int> read_number(const fs::path& file) {
  std::ifstream stream(file);
  int number = 0;
  return stream >> number ? std::optional(number) : std::nullopt;
}

void collect_of_path(const fs::path& path, const fs::path& sys, int depth, std::set<std::string>& disks);

void collect(const fs::path& device, const fs::path& sys, int depth, std::set<std::string>& disks) {
  std::error_code error;
  if (depth == 0 || !fs::exists(device, error)) return;
  // A partition has no queue of its own; its disk, the folder above it, has.
  if (fs::exists(device / "partition", error)) return collect(device.parent_path(), sys, depth, disks);
  if (std::ifstream backing(device / "loop/backing_file"); backing) {
    std::string file;
    std::getline(backing, file);
    return collect_of_path(file, sys, depth - 1, disks);
  }
  const auto slaves = entries_of(device / "slaves");
  for (const std::string& slave : slaves)
    collect(fs::canonical(device / "slaves" / slave, error), sys, depth - 1, disks);
  if (slaves.empty()) disks.insert(device.filename());
}

void collect_of_path(const fs::path& path, const fs::path& sys, int depth, std::set<std::string>& disks) {
  struct stat info {};
  std::error_code error;
  if (::stat(path.c_str(), &info) != 0) return;
  const auto device =
      fs::canonical(sys / "dev/block" / fmt::format("{}:{}", major(info.st_dev), minor(info.st_dev)), error);
  if (!error) collect(device, sys, depth, disks);
}

struct DestroyTopology {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using Topology = std::unique_ptr<hwloc_topology, DestroyTopology>;

/// This machine, or the one in the XML; null where hwloc cannot.
Topology load_topology(const std::string& xml) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  Topology topology(raw);
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_ALL);
  if (!xml.empty() && hwloc_topology_set_xmlbuffer(raw, xml.c_str(), static_cast<int>(xml.size()) + 1) != 0)
    return nullptr;
  if (hwloc_topology_load(raw) != 0) return nullptr;
  return topology;
}

/// Null where hwloc cannot. Kept to the end: loading takes long, and hwloc's plugins leak when the last
/// topology goes and they are unloaded. Only read, so threads may share it.
hwloc_topology_t this_machine() {
  static const hwloc_topology_t topology = load_topology("").release();
  return topology;
}

// The one node that the device hangs at.
std::optional<int> node_in(hwloc_topology_t topology, const std::string& disk) {
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_osdev(topology, device)) != nullptr;) {
    if (device->attr->osdev.type != HWLOC_OBJ_OSDEV_BLOCK || device->name == nullptr || disk != device->name)
      continue;
    const hwloc_obj_t near = hwloc_get_non_io_ancestor_obj(topology, device);
    if (near == nullptr || near->nodeset == nullptr || hwloc_bitmap_weight(near->nodeset) != 1)
      return std::nullopt;
    return hwloc_bitmap_first(near->nodeset);
  }
  return std::nullopt;
}

// The device's own folder, or the nearest above it that says.
std::optional<int> node_in_sys(fs::path at, const fs::path& sys) {
  for (; at.has_relative_path() && at != sys; at = at.parent_path()) {
    if (const auto node = read_number(at / "numa_node")) return *node >= 0 ? node : std::nullopt;
  }
  return std::nullopt;
}

std::set<int> nodes_of(const std::string& disk, hwloc_topology_t topology, const fs::path& sys) {
  std::set<int> nodes;
  if (const auto node = topology != nullptr ? node_in(topology, disk) : std::nullopt) nodes.insert(*node);
  if (!nodes.empty()) return nodes;
  std::error_code error;
  const auto device = fs::canonical(sys / "block" / disk, error);
  if (error) return nodes;
  if (const auto node = node_in_sys(device, fs::canonical(sys, error))) nodes.insert(*node);
  for (const std::string& controller : nvme_controllers(disk, sys)) {
    const auto folder = fs::canonical(sys / "class/nvme" / controller, error);
    if (error) continue;
    if (const auto node = node_in_sys(folder, fs::canonical(sys, error))) nodes.insert(*node);
  }
  return nodes;
}

}  // namespace

std::vector<std::string> disks_of(const fs::path& folder, const fs::path& sys) {
  std::set<std::string> disks;
  collect_of_path(folder, sys, kDepthMax, disks);
  return {disks.begin(), disks.end()};
}

std::vector<std::string> disks_below(const std::string& name, const fs::path& sys) {
  std::set<std::string> disks;
  std::error_code error;
  const auto device = fs::canonical(sys / "class/block" / name, error);
  if (!error) collect(device, sys, kDepthMax, disks);
  return {disks.begin(), disks.end()};
}

// /sys/block/nvme0n1 lies in its controller's folder, or with multipath in the subsystem's, which links the
// controllers.
std::vector<std::string> nvme_controllers(const std::string& disk, const fs::path& sys) {
  const auto is_controller = [](const std::string& name) {
    return name.starts_with("nvme") && name.size() > 4 &&
           name.find_first_not_of("0123456789", 4) == std::string::npos;
  };
  std::error_code error;
  const auto device = fs::canonical(sys / "block" / disk, error);
  if (error || !disk.starts_with("nvme")) return {};
  const auto above = device.parent_path();
  if (is_controller(above.filename())) return {above.filename()};
  auto names = entries_of(above);
  std::erase_if(names, [&](const std::string& name) { return !is_controller(name); });
  return names;
}

std::optional<bool> rotational(const std::string& disk, const fs::path& sys) {
  const auto number = read_number(sys / "block" / disk / "queue/rotational");
  return number ? std::optional(*number != 0) : std::nullopt;
}

std::optional<int> numa_node_of(const std::vector<std::string>& disks, const fs::path& sys) {
  const hwloc_topology_t topology = sys == "/sys" ? this_machine() : nullptr;
  std::set<int> nodes;
  for (const std::string& disk : disks) nodes.merge(nodes_of(disk, topology, sys));
  return nodes.size() == 1 ? std::optional(*nodes.begin()) : std::nullopt;
}

std::optional<int> numa_node_in_topology(const std::string& disk, const std::string& hwloc_xml) {
  this_machine();  // keeps the plugins loaded
  const Topology topology = load_topology(hwloc_xml);
  return topology != nullptr ? node_in(topology.get(), disk) : std::nullopt;
}

struct NearNode::Binding {
  std::unique_ptr<hwloc_bitmap_s, decltype(&hwloc_bitmap_free)> before{hwloc_bitmap_alloc(),
                                                                       &hwloc_bitmap_free};
};

NearNode::NearNode(std::optional<int> node) {
  if (!node) return;
  auto binding = std::make_unique<Binding>();
  const hwloc_topology_t topology = this_machine();
  if (topology == nullptr || hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE) < 2) return;
  const hwloc_obj_t near = hwloc_get_numanode_obj_by_os_index(topology, static_cast<unsigned>(*node));
  if (near == nullptr || hwloc_get_cpubind(topology, binding->before.get(), HWLOC_CPUBIND_THREAD) != 0)
    return;
  if (hwloc_set_cpubind(topology, near->cpuset, HWLOC_CPUBIND_THREAD) == 0) binding_ = std::move(binding);
}

NearNode::~NearNode() {
  if (binding_ != nullptr) hwloc_set_cpubind(this_machine(), binding_->before.get(), HWLOC_CPUBIND_THREAD);
}

}  // namespace overspill::io
