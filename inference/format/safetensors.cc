#include "inference/format/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "inference/error.h"

namespace overspill::inference {
namespace {

using Json = nlohmann::json;

constexpr size_t kDimensionsMax = 16;  // far beyond any model's

struct DtypeBits {
  std::string_view name;
  int64_t bits;
};
constexpr auto kDtypes = std::to_array<DtypeBits>(
    {{"BOOL", 8}, {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F4", 4},
     {"U16", 16}, {"I16", 16}, {"F16", 16}, {"BF16", 16},   {"U32", 32},    {"I32", 32},    {"F32", 32},
     {"U64", 64}, {"I64", 64}, {"F64", 64}, {"C64", 64},    {"F6_E2M3", 6}, {"F6_E3M2", 6}});

/// a * b for numbers that are not negative; empty where int64 does not hold it.
std::optional<int64_t> product(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

/// What makes a header wrong; parse_header adds the file and the way out.
struct Malformed {
  std::string what;
};

/// The bytes of a tensor by its dtype and shape. Throws Malformed.
int64_t bytes_of(const StoredTensor& tensor) {
  const auto* const known = std::ranges::find(kDtypes, tensor.dtype, &DtypeBits::name);
  if (known == kDtypes.end())
    throw Malformed{fmt::format("'{:.80}' has the unknown dtype '{:.20}'", tensor.name, tensor.dtype)};
  std::optional<int64_t> bits = known->bits;
  for (const int64_t size : tensor.shape) bits = bits ? product(*bits, size) : bits;
  if (!bits || *bits % 8 != 0) {
    throw Malformed{fmt::format("'{:.80}', {} of shape [{}], has no size in bytes that a file could have",
                                tensor.name, tensor.dtype, fmt::join(tensor.shape, ", "))};
  }
  return *bits / 8;
}

/// The parser calls these methods as it reads: an object of objects, with a fixed set of fields, and
/// "__metadata__", an object of strings, which is passed over. Nothing else is let in, so that memory is
/// bounded by the text's length.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  std::vector<StoredTensor> take() { return std::move(tensors_); }

  bool null() override { return refuse(); }
  bool boolean(bool) override { return refuse(); }
  bool number_integer(int64_t) override { return refuse(); }  // a negative one
  bool number_float(double, const std::string&) override { return refuse(); }
  bool binary(Json::binary_t&) override { return refuse(); }

  bool number_unsigned(uint64_t value) override {
    if (list_ == nullptr || !std::in_range<int64_t>(value)) return refuse();
    if (list_->size() == kDimensionsMax)
      throw Malformed{fmt::format("'{:.80}' has more than {} numbers in a list", name_, kDimensionsMax)};
    list_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& value) override {
    if (depth_ == 2 && in_metadata_) return true;
    if (depth_ != 2 || field_ != "dtype" || list_ != nullptr) return refuse();
    tensor_.dtype = std::move(value);
    return true;
  }

  bool start_object(size_t) override {
    if (depth_ == 2 || list_ != nullptr) return refuse();
    ++depth_;
    if (depth_ == 2) {
      in_metadata_ = name_ == "__metadata__";
      tensor_ = {};
      tensor_.name = name_;
      offsets_.clear();
      fields_.clear();
    }
    return true;
  }

  bool key(std::string& name) override {
    if (depth_ == 1) {
      if (!names_.insert(name).second) throw Malformed{fmt::format("it names '{:.80}' twice", name)};
      name_ = std::move(name);
      return true;
    }
    field_ = std::move(name);
    if (in_metadata_) return true;
    if (field_ != "dtype" && field_ != "shape" && field_ != "data_offsets") return refuse();
    if (!fields_.insert(field_).second)
      throw Malformed{fmt::format("'{:.80}' gives '{}' twice", name_, field_)};
    return true;
  }

  bool end_object() override {
    --depth_;
    if (depth_ != 1 || std::exchange(in_metadata_, false)) return true;
    if (fields_.size() != 3 || offsets_.size() != 2 || offsets_[0] > offsets_[1])
      throw Malformed{fmt::format("'{:.80}' has no dtype, no shape, or no two rising data_offsets", name_)};
    tensor_.offset = offsets_[0];
    tensor_.bytes = bytes_of(tensor_);
    if (tensor_.bytes != offsets_[1] - offsets_[0]) {
      throw Malformed{fmt::format("'{:.80}', {} of shape [{}], needs {} bytes and has {}", name_,
                                  tensor_.dtype, fmt::join(tensor_.shape, ", "), tensor_.bytes,
                                  offsets_[1] - offsets_[0])};
    }
    tensors_.push_back(std::move(tensor_));
    return true;
  }

  bool start_array(size_t) override {
    if (depth_ != 2 || list_ != nullptr || in_metadata_) return refuse();
    if (field_ != "shape" && field_ != "data_offsets") return refuse();
    list_ = field_ == "shape" ? &tensor_.shape : &offsets_;
    return true;
  }

  bool end_array() override {
    list_ = nullptr;
    return true;
  }

  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    throw Malformed{fmt::format("it is no JSON ({:.200})", error.what())};
  }

 private:
  bool refuse() {
    throw Malformed{fmt::format("'{:.40}' of '{:.80}' is not what a tensor's entry has", field_, name_)};
  }

  std::vector<StoredTensor> tensors_;
  std::set<std::string> names_;
  int depth_ = 0;  // of the objects that have begun
  std::string name_;
  bool in_metadata_ = false;
  std::string field_;
  std::set<std::string> fields_;
  StoredTensor tensor_;
  std::vector<int64_t> offsets_;
  std::vector<int64_t>* list_ = nullptr;  // that the parser is in
};

/// Offsets count from the header's end: makes them count from the file's begin. Throws Malformed unless the
/// tensors tile the rest of the file.
void place(std::vector<StoredTensor>& tensors, int64_t data_begin, int64_t file_bytes) {
  std::ranges::sort(tensors, {}, [](const StoredTensor& t) { return std::pair(t.offset, t.bytes); });
  int64_t end = 0;
  for (StoredTensor& tensor : tensors) {
    if (tensor.offset != end) {
      throw Malformed{
          fmt::format("'{:.80}' begins at byte {} of the data, where byte {} is next: tensors "
                      "overlap, or bytes belong to none",
                      tensor.name, tensor.offset, end)};
    }
    end += tensor.bytes;  // no overflow: it is the second of two offsets that are int64
  }
  if (end != file_bytes - data_begin) {
    throw Malformed{
        fmt::format("its tensors have {} bytes and the file has {} for them: it was cut off, or "
                    "something was added",
                    end, file_bytes - data_begin)};
  }
  for (StoredTensor& tensor : tensors) tensor.offset += data_begin;
}

}  // namespace

int64_t StoredTensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;  // checked by parse_header
  return count;
}

int64_t header_bytes(std::string_view first_eight, int64_t file_bytes, const std::string& file) {
  if (static_cast<int64_t>(first_eight.size()) < kHeaderLengthBytes || file_bytes < kHeaderLengthBytes)
    throw ModelError(fmt::format("{}: it has {} bytes, too few for a safetensors file; fetch the model again",
                                 file, file_bytes));
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i)
    length = length << 8 | static_cast<uint8_t>(first_eight[static_cast<size_t>(i)]);
  const int64_t most = std::min(kHeaderBytesMax, file_bytes - kHeaderLengthBytes);
  if (std::cmp_greater(length, most)) {
    throw ModelError(
        fmt::format("{}: its header would have {} bytes, and {} are possible: it is damaged or "
                    "no safetensors file; fetch the model again",
                    file, length, most));
  }
  return static_cast<int64_t>(length);
}

std::vector<StoredTensor> parse_header(std::string_view text, int64_t file_bytes, const std::string& file) {
  try {
    HeaderReader reader;
    Json::sax_parse(text, &reader);
    std::vector<StoredTensor> tensors = reader.take();
    place(tensors, kHeaderLengthBytes + static_cast<int64_t>(text.size()), file_bytes);
    return tensors;
  } catch (const Malformed& error) {
    throw ModelError(fmt::format("{}: {}; fetch the model again", file, error.what));
  }
}

}  // namespace overspill::inference
