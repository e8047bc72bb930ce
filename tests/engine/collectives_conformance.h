// What every transport has to do: bodies that each rank of a world runs. They use gtest's macros, so the rank
// whose numbers are wrong says so.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu_optim/elements.h"
#include "engine/collectives/communicator.h"
#include "kernels/device.h"

namespace overspill::engine::conformance {

/// Does not repeat every 256 bytes: transports cut at such places.
inline std::byte pattern(int from, int to, size_t i) {
  return static_cast<std::byte>(31 * from + 7 * to + 3 * i + 13 * (i / 251) + 1);
}

inline void move_every_slice(Communicator& ranks, int rounds = 50) {
  const int world = ranks.world(), rank = ranks.rank();
  std::mt19937 random(42);  // the same sizes on every rank
  for (int round = 0; round < rounds; ++round) {
    const size_t slice = random() % 3 == 0 ? random() % 4 : random() % 20'000;
    std::vector<std::byte> gathered(slice * world), send(slice * world), received(slice * world);
    for (size_t i = 0; i < slice; ++i) gathered[rank * slice + i] = pattern(rank, rank, i);
    for (int to = 0; to < world; ++to) {
      for (size_t i = 0; i < slice; ++i) send[to * slice + i] = pattern(rank, to, i);
    }
    ranks.all_gather(gathered);
    ranks.all_to_all(send, received);
    for (int from = 0; from < world; ++from) {
      for (size_t i = 0; i < slice; ++i) {
        ASSERT_EQ(gathered[from * slice + i], pattern(from, from, i)) << "round " << round;
        ASSERT_EQ(received[from * slice + i], pattern(from, rank, i)) << "round " << round;
      }
    }
    // Whoever returns may reuse its memory at once: nobody still reads it.
    std::ranges::fill(gathered, std::byte{0xEE});
    std::ranges::fill(send, std::byte{0xEE});
  }
}

/// Every pair of ranks another number of bytes, many of them none.
inline void exchange_what_each_pair_wants(Communicator& ranks, int rounds = 50) {
  const int world = ranks.world(), rank = ranks.rank();
  for (int round = 0; round < rounds; ++round) {
    const auto bytes_of = [&](int from, int to) {
      std::mt19937 random(static_cast<unsigned>((round * world + from) * world + to));
      return random() % 2 == 0 ? size_t{0} : size_t{random() % 20'000};
    };
    std::vector<std::vector<std::byte>> sent(world), received(world);
    std::vector<std::span<const std::byte>> send(world);
    std::vector<std::span<std::byte>> receive(world);
    for (int peer = 0; peer < world; ++peer) {
      if (peer == rank) continue;
      sent[peer].resize(bytes_of(rank, peer));
      received[peer].resize(bytes_of(peer, rank));
      for (size_t i = 0; i < sent[peer].size(); ++i) sent[peer][i] = pattern(rank, peer, i);
      send[peer] = sent[peer];
      receive[peer] = received[peer];
    }
    ranks.exchange(send, receive);
    for (int from = 0; from < world; ++from) {
      for (size_t i = 0; i < received[from].size(); ++i)
        ASSERT_EQ(received[from][i], pattern(from, rank, i)) << "round " << round;
    }
    for (auto& bytes : sent) std::ranges::fill(bytes, std::byte{0xEE});  // nobody still reads it
  }
}

/// Several exchanges as one call; of each the ranks' bytes arrive in the memory of that exchange.
inline void exchange_together(Communicator& ranks, int rounds = 20) {
  const int world = ranks.world(), rank = ranks.rank();
  const auto bytes_of = [](int round, int i, int from, int to) {
    return static_cast<size_t>((round + i * 7 + from * 5 + to * 3) % 4 * 701);
  };
  for (int round = 0; round < rounds; ++round) {
    const int count = round % 4;
    std::vector<engine::Exchange> exchanges(static_cast<size_t>(count));
    std::vector<std::vector<std::byte>> sent(count * world), received(count * world);
    for (int i = 0; i < count; ++i) {
      exchanges[i].send.resize(world);
      exchanges[i].receive.resize(world);
      for (int peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        auto& out = sent[i * world + peer];
        auto& in = received[i * world + peer];
        out.assign(bytes_of(round, i, rank, peer), pattern(rank, peer, i));
        in.resize(bytes_of(round, i, peer, rank));
        exchanges[i].send[peer] = out;
        exchanges[i].receive[peer] = in;
      }
    }
    ranks.exchange_together(exchanges);
    for (int i = 0; i < count; ++i) {
      for (int from = 0; from < world; ++from) {
        for (const std::byte byte : received[i * world + from])
          ASSERT_EQ(byte, pattern(from, rank, i)) << "round " << round << ", exchange " << i;
      }
    }
    for (auto& bytes : sent) std::ranges::fill(bytes, std::byte{0xEE});  // nobody still reads it
  }
}

/// Every rank's bytes in memory of its device in every other round, so that each kind meets each.
inline void exchange_from_either_memory(Communicator& ranks, kernels::Device& device, int rounds = 20) {
  const int world = ranks.world(), rank = ranks.rank();
  ASSERT_EQ(ranks.device(), &device);
  const auto stream = device.make_stream();
  for (int round = 0; round < rounds; ++round) {
    const auto bytes_of = [&](int from, int to) {
      return from == to ? size_t{0} : static_cast<size_t>((round * 977 + from * 5 + to * 3) % 3 * 4001);
    };
    std::vector<std::byte> sent, received;
    std::vector<size_t> send_at, receive_at;
    for (int peer = 0; peer < world; ++peer) {
      send_at.push_back(sent.size());
      receive_at.push_back(received.size());
      for (size_t i = 0; i < bytes_of(rank, peer); ++i) sent.push_back(pattern(rank, peer, i));
      received.resize(received.size() + bytes_of(peer, rank));
    }
    const bool on_device = (round >> rank) % 2 == 0;
    const kernels::DeviceMemory device_sent = device.allocate(std::ssize(sent));
    const kernels::DeviceMemory device_received = device.allocate(std::ssize(received));
    stream->copy_from_host(device_sent.data(), sent.data(), std::ssize(sent));
    stream->record().wait();
    std::vector<std::span<const std::byte>> send;
    std::vector<std::span<std::byte>> receive;
    for (int peer = 0; peer < world; ++peer) {
      const std::byte* const from = on_device ? device_sent.data() : sent.data();
      std::byte* const to = on_device ? device_received.data() : received.data();
      send.emplace_back(from + send_at[peer], bytes_of(rank, peer));
      receive.emplace_back(to + receive_at[peer], bytes_of(peer, rank));
    }
    if (on_device) {
      ranks.exchange_on_device(send, receive);
      stream->copy_to_host(received.data(), device_received.data(), std::ssize(received));
      stream->record().wait();
    } else {
      ranks.exchange(send, receive);
    }
    for (int from = 0; from < world; ++from) {
      for (size_t i = 0; i < bytes_of(from, rank); ++i)
        ASSERT_EQ(received[receive_at[from] + i], pattern(from, rank, i)) << "round " << round;
    }
  }
}

/// Rank 0 sends less than rank 1 has room for.
inline void an_odd_pair(Communicator& ranks) {
  std::vector<std::byte> data(16);
  std::vector<std::span<const std::byte>> send(ranks.world());
  std::vector<std::span<std::byte>> receive(ranks.world());
  if (ranks.rank() == 0) send[1] = std::span(data).first(8);
  if (ranks.rank() == 1) receive[0] = data;
  ranks.exchange(send, receive);
  ranks.barrier();
}

inline void sum_in_rank_order_to_the_bit(Communicator& ranks) {
  const int count = 1000;
  std::mt19937_64 random(7);
  std::vector<std::vector<double>> addends(ranks.world(), std::vector<double>(count));
  for (auto& of_rank : addends) {
    // Magnitudes far apart, so that any other order gives other bits.
    for (double& x : of_rank)
      x = std::ldexp(static_cast<double>(random() % 1000) - 500, static_cast<int>(random() % 80));
    of_rank[0] = -0.0;
  }
  std::vector<double> expected = addends[0];
  for (int rank = 1; rank < ranks.world(); ++rank) {
    for (int i = 0; i < count; ++i) expected[i] += addends[rank][i];
  }
  for (int round = 0; round < 20; ++round) {
    std::vector<double> values = addends[ranks.rank()];
    ranks.all_reduce_sum(values);
    ASSERT_EQ(std::memcmp(values.data(), expected.data(), count * sizeof(double)), 0);
  }
}

/// Whole numbers that are exact in every type, whatever the order they are added in.
inline void reduce_and_scatter(Communicator& ranks, int rounds = 50) {
  const int world = ranks.world(), rank = ranks.rank();
  std::mt19937 random(43);  // the same sizes on every rank
  const auto addend = [](int from, int to, size_t i) {
    return static_cast<float>((31 * from + 7 * to + 3 * static_cast<int>(i % 1009)) % 33 - 16);
  };
  for (int round = 0; round < rounds; ++round) {
    const size_t count = random() % 3 == 0 ? random() % 4 : random() % 5'000;
    for (const optim::Element element : {optim::Element::bf16, optim::Element::fp16, optim::Element::fp32}) {
      const size_t slice = count * static_cast<size_t>(optim::bytes(element));
      std::vector<std::byte> send(slice * static_cast<size_t>(world)), sum(slice);
      std::vector<float> values(count);
      for (int to = 0; to < world; ++to) {
        for (size_t i = 0; i < count; ++i) values[i] = addend(rank, to, i);
        optim::narrow(element, values, send.data() + static_cast<size_t>(to) * slice);
      }
      ranks.reduce_scatter_sum(send, sum, element);
      std::ranges::fill(send, std::byte{0xEE});  // nobody still reads it
      optim::widen(element, sum.data(), values, true);
      for (size_t i = 0; i < count; ++i) {
        float expected = 0;
        for (int from = 0; from < world; ++from) expected += addend(from, rank, i);
        ASSERT_EQ(values[i], expected) << "round " << round << " element " << i;
      }
    }
  }
}

/// Rank 0 has room for another sum than it sends slices of.
inline void a_sum_of_another_size(Communicator& ranks) {
  std::vector<std::byte> send(8 * static_cast<size_t>(ranks.world())), sum(ranks.rank() == 0 ? 16 : 8);
  ranks.reduce_scatter_sum(send, sum, optim::Element::fp32);
}

/// One rank's sizes differ from the others'; for a world of one, what is sent from what is received.
inline void sizes_that_differ(Communicator& ranks) {
  const int world = ranks.world();
  std::vector<std::byte> data(world * (ranks.rank() == world - 1 ? 8 : 16));
  std::vector<std::byte> to(world * (world == 1 ? 9 : 16));
  ranks.all_to_all(data, to);
}

inline void a_size_that_is_not_a_multiple(Communicator& ranks) {
  std::vector<std::byte> data(ranks.world() + 1);
  ranks.all_gather(data);
}

/// Rank 1 makes another call than the others.
inline void another_call(Communicator& ranks) {
  std::vector<std::byte> send(3 * static_cast<size_t>(ranks.world())), receive(send.size());
  if (ranks.rank() == 1) {
    ranks.all_to_all(send, receive);
  } else {
    ranks.all_gather(send);
  }
}

}  // namespace overspill::engine::conformance
