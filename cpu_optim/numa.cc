#include "cpu_optim/numa.h"

#include <hwloc.h>

namespace overspill::optim {
namespace {

struct FreeTopology {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
struct FreeBitmap {
  void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;

// Binds the calling thread while it lives: to the node's cores that the thread may use already, never to
// more.
class Binding {
 public:
  Binding(hwloc_topology_t topology, int node) : topology_(topology), before_(hwloc_bitmap_alloc()) {
    if (topology == nullptr || hwloc_get_cpubind(topology, before_.get(), HWLOC_CPUBIND_THREAD) != 0) return;
    const hwloc_obj_t object =
        hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(node));
    if (object == nullptr) return;
    const Bitmap both(hwloc_bitmap_alloc());
    hwloc_bitmap_and(both.get(), before_.get(), object->cpuset);
    bound_ = hwloc_bitmap_iszero(both.get()) == 0 &&
             hwloc_set_cpubind(topology, both.get(), HWLOC_CPUBIND_THREAD) == 0;
  }
  ~Binding() {
    if (bound_) hwloc_set_cpubind(topology_, before_.get(), HWLOC_CPUBIND_THREAD);
  }
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;

 private:
  hwloc_topology_t topology_;
  Bitmap before_;
  bool bound_ = false;
};

class HwlocNodes final : public Nodes {
 public:
  HwlocNodes() {
    hwloc_topology_t topology = nullptr;
    if (hwloc_topology_init(&topology) != 0) return;
    topology_.reset(topology);
    if (hwloc_topology_load(topology) != 0) topology_.reset();
  }

  int count() const override {
    const int found = topology_ ? hwloc_get_nbobjs_by_type(topology_.get(), HWLOC_OBJ_NUMANODE) : 1;
    return found < 1 ? 1 : found;
  }

  int of(const void* address) const override {
    if (count() == 1) return 0;
    const Bitmap set(hwloc_bitmap_alloc());
    if (hwloc_get_area_memlocation(topology_.get(), address, 1, set.get(), HWLOC_MEMBIND_BYNODESET) != 0) {
      return 0;
    }
    const int os_index = hwloc_bitmap_first(set.get());
    if (os_index < 0) return 0;
    const hwloc_obj_t node =
        hwloc_get_numanode_obj_by_os_index(topology_.get(), static_cast<unsigned>(os_index));
    return node == nullptr ? 0 : static_cast<int>(node->logical_index);
  }

  bool prefer(void* data, int64_t bytes, int os_node) const {
    if (!topology_ || os_node < 0) return false;
    const hwloc_obj_t node =
        hwloc_get_numanode_obj_by_os_index(topology_.get(), static_cast<unsigned>(os_node));
    // Without HWLOC_MEMBIND_STRICT it is a wish: another node serves where this one is full.
    return node != nullptr &&
           hwloc_set_area_membind(topology_.get(), data, static_cast<size_t>(bytes), node->nodeset,
                                  HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET) == 0;
  }

  void run_on(int node, const std::function<void()>& work) const override {
    const Binding binding(topology_.get(), node);
    work();
  }

 private:
  std::unique_ptr<hwloc_topology, FreeTopology> topology_;
};

const HwlocNodes& this_machine() {
  static const HwlocNodes nodes;
  return nodes;
}

}  // namespace

bool prefer_node(void* data, int64_t bytes, int os_node) {
  return this_machine().prefer(data, bytes, os_node);
}

const Nodes& machine_nodes() {
  return this_machine();
}

}  // namespace overspill::optim
