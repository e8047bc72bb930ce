// What every transport has to do, over a torch.distributed group: each rank's process calls these
// (tests/python/test_ranks.py).
#include <gtest/gtest.h>
#include <pybind11/pybind11.h>

#include <string>
#include <thread>

#include "bindings/group_communicator.h"
#include "tests/engine/collectives_conformance.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using engine::Communicator;

/// Runs `body` over `group`: what it threw, or the failures of gtest, or "".
template <class Body>
std::string outcome(py::object group, Body body) {
  const auto ranks = make_group_communicator(std::move(group));
  const py::gil_scoped_release release;
  try {
    body(*ranks);
  } catch (const engine::CommunicatorError& error) {
    try {
      ranks->barrier();
      return "a world that has ended goes on";
    } catch (const engine::CommunicatorError&) {
      return error.what();
    }
  }
  return testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? "gtest found differences" : "";
}

template <class Body>
void define(py::module_& m, const char* name, Body body) {
  m.def(name, [body](py::object group) { return outcome(std::move(group), body); });
}

/// Each rank to the next one only, if there is another.
void exchange_with_neighbours(Communicator& ranks, std::span<const std::byte> send,
                              std::span<std::byte> receive) {
  const auto world = static_cast<size_t>(ranks.world()), rank = static_cast<size_t>(ranks.rank());
  std::vector<std::span<const std::byte>> to(world);
  std::vector<std::span<std::byte>> from(world);
  to[(rank + 1) % world] = send;
  from[(rank + world - 1) % world] = receive;
  ranks.exchange(to, from);
}

/// Goes on for ever with one kind of call, of `bytes` to each rank: for ranks that are killed.
void repeat(Communicator& ranks, const std::string& call, size_t bytes) {
  std::vector<std::byte> send(bytes * ranks.world()), receive(send.size());
  std::vector<double> values(1000, 1.0);
  while (true) {
    if (call == "all_gather") ranks.all_gather(send);
    if (call == "all_to_all") ranks.all_to_all(send, receive);
    if (call == "exchange") exchange_with_neighbours(ranks, send, receive);
    if (call == "all_reduce_sum") ranks.all_reduce_sum(values);
    if (call == "barrier") ranks.barrier();
  }
}

}  // namespace
}  // namespace overspill::bindings

PYBIND11_MODULE(_ranks_conformance, m) {
  using overspill::bindings::define;
  using overspill::engine::Communicator;
  namespace conformance = overspill::engine::conformance;
  namespace py = pybind11;
  define(m, "move_every_slice", [](Communicator& ranks) { conformance::move_every_slice(ranks); });
  define(m, "exchange_together", [](Communicator& ranks) { conformance::exchange_together(ranks); });
  define(m, "exchange_what_each_pair_wants",
         [](Communicator& ranks) { conformance::exchange_what_each_pair_wants(ranks); });
  define(m, "an_odd_pair", conformance::an_odd_pair);
  define(m, "sum_in_rank_order_to_the_bit", conformance::sum_in_rank_order_to_the_bit);
  define(m, "sizes_that_differ", conformance::sizes_that_differ);
  define(m, "a_size_that_is_not_a_multiple", conformance::a_size_that_is_not_a_multiple);
  define(m, "another_call", conformance::another_call);
  define(m, "barrier", [](Communicator& ranks) { ranks.barrier(); });
  define(m, "rank_1_aborts", [](Communicator& ranks) {
    ranks.barrier();
    if (ranks.rank() == 1) ranks.abort("the disk is full");
    ranks.barrier();
  });
  define(m, "rank_1_is_late", [](Communicator& ranks) {
    ranks.barrier();
    if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(6));
    ranks.barrier();
  });
  m.def("repeat", [](py::object group, const std::string& call, size_t bytes) {
    return overspill::bindings::outcome(std::move(group), [call, bytes](Communicator& ranks) {
      overspill::bindings::repeat(ranks, call, bytes);
    });
  });
}
