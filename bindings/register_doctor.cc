#include <hwloc.h>
#include <pybind11/stl.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "cpu_optim/dispatch.h"
#include "io/block_device.h"
#include "io/drive_wear.h"
#include "io/probe.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// Cores and NUMA nodes as hwloc sees them; -1 where it cannot tell.
struct Topology {
  int cores = -1;
  int numa_nodes = -1;
};

Topology topology() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return {};
  const std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)> owned(raw,
                                                                                 &hwloc_topology_destroy);
  if (hwloc_topology_load(raw) != 0) return {};
  return {hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_CORE), hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_NUMANODE)};
}

/// The drives below a folder, and how worn they say they are.
py::list drives(const std::string& folder) {
  struct Told {
    std::string name;
    std::optional<io::DriveWear> wear;
    std::string unknown;
  };
  std::vector<Told> told;
  {
    const py::gil_scoped_release release;  // a drive that hangs answers late
    for (const std::string& name : io::disks_of(folder)) {
      Told& drive = told.emplace_back(Told{name, std::nullopt, {}});
      drive.wear = io::read_drive_wear(name, drive.unknown);
    }
  }
  py::list out;
  for (const auto& [name, wear, unknown] : told) {
    py::dict drive;
    drive["name"] = name;
    drive["percentage_used"] = wear ? py::cast(wear->percentage_used) : py::none();
    drive["written_bytes"] = wear ? py::cast(wear->written_bytes) : py::none();
    drive["unknown"] = unknown;
    out.append(drive);
  }
  return out;
}

py::dict disk_dict(const std::string& folder, const io::DiskProbe& probe) {
  py::dict disk;
  disk["folder"] = folder;
  disk["direct"] = probe.direct;
  disk["direct_refusal"] = probe.direct_refusal;
  const auto& alignment = probe.direct_alignment;
  disk["direct_mem_align"] = alignment ? py::cast(alignment->mem_bytes) : py::none();
  disk["direct_offset_align"] = alignment ? py::cast(alignment->offset_bytes) : py::none();
  disk["io_uring"] = probe.io_uring;
  disk["io_uring_refusal"] = probe.io_uring_refusal;
  disk["read_bytes_per_s"] = probe.read_bytes_per_s;
  disk["write_bytes_per_s"] = probe.write_bytes_per_s;
  disk["free_bytes"] = probe.free_bytes;
  disk["file_system"] = probe.file_system;
  disk["disks"] = probe.disks;
  disk["rotational"] = probe.rotational;
  disk["numa_node"] = probe.numa_node;
  disk["backend"] = probe.backend;
  return disk;
}

py::dict doctor(const std::vector<std::string>& folders) {
  py::dict out;
  rlimit limit{};
  const bool known = ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0;
  out["memlock_limit_bytes"] =
      !known || limit.rlim_cur == RLIM_INFINITY ? int64_t{-1} : static_cast<int64_t>(limit.rlim_cur);
  out["transparent_huge_pages"] = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  out["io_uring_disabled"] = first_line("/proc/sys/kernel/io_uring_disabled");
  out["instruction_set"] = std::string(optim::instruction_set());
  const Topology machine = topology();
  out["cores"] = machine.cores;
  out["numa_nodes"] = machine.numa_nodes;
  py::list disks;
  for (const std::string& folder : folders) {
    io::DiskProbe probe;
    {
      const py::gil_scoped_release release;
      probe = io::probe_disk(folder);
    }
    disks.append(disk_dict(folder, probe));
  }
  out["disks"] = disks;
  return out;
}

}  // namespace

void register_doctor(py::module_& m) {
  m.def("doctor", &doctor, py::arg("folders") = std::vector<std::string>{},
        "What this machine offers; each folder is measured for about two seconds.");
  m.def("drives", &drives, py::arg("folder"),
        "The drives a folder lies on, and the wear that they tell; empty where they are unknown.");
}

}  // namespace overspill::bindings
