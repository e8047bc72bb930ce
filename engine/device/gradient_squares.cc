#include "engine/device/gradient_squares.h"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "engine/device/device_gradients.h"

namespace overspill::engine {

GradientSquares::GradientSquares(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model)
    : setup_(setup),
      core_(core),
      hardware_(hardware),
      of_(model.chunks.size()),
      copy_(hardware.device(), hardware.host_budget, setup.plan.squares_device_bytes,
            "squares of gradients on the device"),
      first_block_(model.chunks.size()) {
  for (size_t c = 0; c < of_.size(); ++c) of_[c].resize(setup.layout.chunks[c].runs.size());
  if (setup.plan.squares_device_bytes == 0) return;
  int64_t blocks = 0;
  for (size_t c = 0; c < setup.layout.chunks.size(); ++c) {
    const Chunk& chunk = setup.layout.chunks[c];
    if (!setup.layout.units[chunk.unit].trainable()) continue;
    for (const Run& run : chunk.runs)
      first_block_[c].push_back(std::exchange(blocks, blocks + kernels::squares_blocks(run.elements)));
  }
  if (blocks * static_cast<int64_t>(sizeof(kernels::Squares)) > setup.plan.squares_device_bytes)
    throw std::logic_error("squares on the device take more than was planned");
  memory_ = hardware.device().allocate(setup.plan.squares_device_bytes);
  stream_ = hardware.device().make_stream();
  hardware.device().kernels()->clear(*stream_, memory_.data(), memory_.bytes());
  stream_->record().wait();  // other streams write there
}

GradientSquares::~GradientSquares() {
  settle();
}

void GradientSquares::settle() noexcept {
  engine::settle(stream_.get());
}

bool GradientSquares::taken_there(int32_t unit) const {
  return stream_ != nullptr && setup_.layout.units[unit].trainable();
}

void GradientSquares::take_there(kernels::Stream& stream, int32_t unit, int32_t segment, optim::Element type,
                                 const std::byte* gradient) {
  const int64_t width = optim::bytes(type);
  auto* const blocks = reinterpret_cast<kernels::Squares*>(memory_.data());
  // A chunk fills a small part of a GPU, and one kernel waits for the one before: runs go together where
  // their blocks lie as those of one run would.
  struct Together {
    int64_t begin = 0;  // in the segment
    int64_t elements = 0;
    int64_t first_block = 0;
  } together;
  const auto take = [&] {
    if (together.elements == 0) return;
    hardware_.device().kernels()->squares(stream, type, gradient + together.begin * width, together.elements,
                                          blocks + together.first_block);
  };
  for_each_run(setup_.layout, unit, segment, [&](int32_t chunk, int32_t run, int64_t in_segment) {
    const int64_t elements = setup_.layout.chunks[chunk].runs[run].elements;
    const int64_t first_block = first_block_[chunk][run];
    const bool goes_on = together.elements > 0 && together.elements % kernels::kSquaresBlock == 0 &&
                         together.begin + together.elements == in_segment &&
                         together.first_block + together.elements / kernels::kSquaresBlock == first_block;
    if (goes_on) {
      together.elements += elements;
    } else {
      take();
      together = {in_segment, elements, first_block};
    }
    of_[chunk][run].taken = Taken::there;
  });
  take();
}

kernels::Event GradientSquares::take_there(const kernels::Event& ready, int32_t unit, int32_t segment,
                                           optim::Element type, const std::byte* gradient) {
  stream_->wait(ready);
  take_there(*stream_, unit, segment, type, gradient);
  return stream_->record();
}

void GradientSquares::fetch() {
  if (stream_ == nullptr) return;
  try {
    stream_->copy_to_host(copy_.data(), memory_.data(), copy_.bytes());
    core_.wait_for(stream_->record());
  } catch (const kernels::DeviceError& error) {
    core_.fail(fmt::format("squares of gradients on the device: {}", error.what()));
    core_.check();
  }
}

std::optional<optim::Squares> GradientSquares::of(int32_t chunk, size_t run) const {
  const OfRun& own = of_[chunk][run];
  switch (own.taken) {
    case Taken::no:
      break;
    case Taken::here:
      return own.squares;
    case Taken::there:
      return from_device(chunk, run);
  }
  return std::nullopt;
}

optim::Squares GradientSquares::from_device(int32_t chunk, size_t run) const {
  const auto* block = reinterpret_cast<const kernels::Squares*>(copy_.data()) + first_block_[chunk][run];
  const int64_t count = kernels::squares_blocks(setup_.layout.chunks[chunk].runs[run].elements);
  optim::Squares total;
  for (const kernels::Squares* end = block + count; block < end; ++block) {
    total.sum += block->sum;
    total.finite = total.finite && block->not_finite == 0;
  }
  return total;
}

}  // namespace overspill::engine
