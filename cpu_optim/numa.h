// Where memory is, and running there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace overspill::optim {

/// The machine's NUMA nodes, counted from 0; a machine without them is one node. Threads: free of state.
class Nodes {
 public:
  virtual ~Nodes() = default;
  virtual int count() const = 0;
  /// The node that holds the page at this address; 0 where it is not there yet or the system does not say.
  virtual int of(const void* address) const = 0;
  /// Calls `work` with the calling thread bound to the node's cores (as far as this process may use them),
  /// then puts the thread's binding back. Where binding is refused it just calls.
  virtual void run_on(int node, const std::function<void()>& work) const = 0;
};

/// Pages that are not there yet will lie on this node, by the system's number, as long as it has room. False,
/// and nothing has changed: there is no such node, or the system refuses.
bool prefer_node(void* data, int64_t bytes, int os_node);

/// As hwloc sees this machine; read at the first call.
const Nodes& machine_nodes();

}  // namespace overspill::optim
