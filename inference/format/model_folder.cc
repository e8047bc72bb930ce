#include "inference/format/model_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <set>
#include <system_error>
#include <utility>

#include "inference/error.h"
#include "inference/format/json.h"
#include "io/files.h"
#include "io/patient_read.h"

namespace overspill::inference {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kConfigBytesMax = int64_t{4} << 20;
constexpr int64_t kIndexBytesMax = int64_t{64} << 20;
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

constexpr size_t kEndTokensMax = 1024;  // far more than any model has

bool lies_in(const fs::path& path, const fs::path& root) {
  if (root.empty()) return false;
  return std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
}

/// Adds what `eos_token_id` of a configuration is: a number, a list of them, or nothing.
void add_end_tokens(const Json& config, const std::string& file, std::vector<int32_t>& to) {
  const auto found = config.find("eos_token_id");
  if (found == config.end() || found->is_null()) return;
  const Json list = found->is_array() ? *found : Json::array({*found});
  if (list.size() > kEndTokensMax) {
    throw ModelError(
        fmt::format("{}: eos_token_id has {} tokens, and at most {} are possible; correct the file", file,
                    list.size(), kEndTokensMax));
  }
  for (const Json& token : list) {
    if (!token.is_number_unsigned() || token.get<uint64_t>() > std::numeric_limits<int32_t>::max()) {
      throw ModelError(
          fmt::format("{}: eos_token_id is {:.80}, and a token is a number from 0; correct the file", file,
                      found->dump()));
    }
    const auto value = token.get<int32_t>();
    if (std::ranges::find(to, value) == to.end()) to.push_back(value);
  }
}

}  // namespace

ModelFolder::ModelFolder(const fs::path& folder) : path_(folder) {
  std::error_code error;
  roots_[0] = fs::canonical(folder, error);
  if (error || !fs::is_directory(roots_[0], error)) {
    throw ModelError(fmt::format("{} is no folder; give a Hugging Face folder (config.json, {})",
                                 folder.string(), kSingle));
  }
  if (roots_[0].parent_path().filename() == "snapshots")
    roots_[1] = roots_[0].parent_path().parent_path() / "blobs";
  config_ = read_json("config.json", kConfigBytesMax);
  if (fs::exists(path_ / "generation_config.json", error)) {
    add_end_tokens(read_json("generation_config.json", kConfigBytesMax),
                   (path_ / "generation_config.json").string(), end_tokens_);
  }
  add_end_tokens(config_, (path_ / "config.json").string(), end_tokens_);

  std::unordered_map<std::string, std::string> index;
  for (const std::string& name : weight_files(index)) read_headers(name);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const StoredTensor& tensor = tensors_[i];
    const std::string file = files_[static_cast<size_t>(tensor.file)].path.filename();
    if (const auto [other, is_new] = by_name_.try_emplace(tensor.name, i); !is_new) {
      throw ModelError(
          fmt::format("{}: '{:.80}' is in two files; fetch the model again", path_.string(), tensor.name));
    }
    if (const auto said = index.find(tensor.name);
        !index.empty() && (said == index.end() || said->second != file)) {
      throw ModelError(fmt::format("{}: '{:.80}' is in {}, and {} says otherwise; fetch the model again",
                                   path_.string(), tensor.name, file, kIndex));
    }
  }
  for (const auto& [name, file] : index) {
    if (!by_name_.contains(name)) {
      throw ModelError(fmt::format("{}: {} lacks '{:.80}', which {} says is there; fetch the model again",
                                   path_.string(), file, name, kIndex));
    }
  }
}

const StoredTensor* ModelFolder::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

/// The tensor's file. Throws std::out_of_range where these are no bytes of the tensor.
const ModelFolder::File& ModelFolder::file_of(const StoredTensor& tensor, int64_t offset,
                                              int64_t bytes) const {
  if (offset < 0 || offset > tensor.bytes || bytes > tensor.bytes - offset) {
    throw std::out_of_range(fmt::format("bytes {} to {} of '{:.80}', which has {}", offset, offset + bytes,
                                        tensor.name, tensor.bytes));
  }
  return files_.at(static_cast<size_t>(tensor.file));
}

void ModelFolder::read(const StoredTensor& tensor, int64_t offset, std::span<std::byte> to) const {
  read_bytes(file_of(tensor, offset, static_cast<int64_t>(to.size())), tensor.offset + offset, to);
}

std::span<const std::byte> ModelFolder::read_direct(const StoredTensor& tensor, int64_t offset, int64_t bytes,
                                                    std::span<std::byte> room) const {
  const File& file = file_of(tensor, offset, bytes);
  const int64_t first = tensor.offset + offset, block = first / kDirectBytes * kDirectBytes;
  const int64_t skipped = first - block;
  // Up to the end of the file's last block, of which the file has a part.
  const int64_t whole = (skipped + bytes + kDirectBytes - 1) / kDirectBytes * kDirectBytes;
  if (static_cast<int64_t>(room.size()) < whole)
    throw std::out_of_range(fmt::format("{} bytes of room for a direct read of {}", room.size(), whole));
  const std::span<std::byte> found = room.subspan(static_cast<size_t>(skipped), static_cast<size_t>(bytes));
  int64_t have = 0;
  while (file.direct && have < skipped + bytes) {
    const std::span<std::byte> to =
        room.subspan(static_cast<size_t>(have), static_cast<size_t>(whole - have));
    const ssize_t count = io::read_some(file.direct.get(), to, block + have, file.path);
    if (count <= 0) break;  // by the other way, whose errors say what is wrong
    have += count;
    if (have % kDirectBytes != 0) break;  // the file ends in this block
  }
  if (have >= skipped + bytes) return found;
  read_bytes(file, first, found);
  ::posix_fadvise(file.fd.get(), first, bytes, POSIX_FADV_DONTNEED);  // a wish
  return found;
}

ModelFolder::File ModelFolder::open(const std::string& name) const {
  File file;
  file.path = path_ / name;
  // O_NONBLOCK: a named pipe must not hang the reader.
  file.fd = io::UniqueFd(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.fd) {
    const std::error_code error(errno, std::generic_category());
    throw ModelError(
        fmt::format("{}: {}; give a Hugging Face folder that has it", file.path.string(), error.message()));
  }
  // Asked of the open file, so that no link can change in between.
  std::error_code error;
  const fs::path target = fs::read_symlink(fmt::format("/proc/self/fd/{}", file.fd.get()), error);
  if (error || !(lies_in(target, roots_[0]) || lies_in(target, roots_[1]))) {
    throw ModelError(fmt::format("{} is a link to {}, which is not in the folder; copy the file there",
                                 file.path.string(), error ? "somewhere" : target.string()));
  }
  struct stat status {};
  if (::fstat(file.fd.get(), &status) != 0) throw io::system_error(io::Operation::open, file.path);
  if (!S_ISREG(status.st_mode))
    throw ModelError(fmt::format("{} is no regular file; fetch the model again", file.path.string()));
  file.bytes = status.st_size;
  // The open file again, so that it is the one that was checked.
  file.direct = io::UniqueFd(
      ::open(fmt::format("/proc/self/fd/{}", file.fd.get()).c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
  return file;
}

Json ModelFolder::read_json(const std::string& name, int64_t bytes_max) const {
  const File file = open(name);
  if (file.bytes > bytes_max) {
    throw ModelError(fmt::format("{} has {} bytes, and no such file has more than {}; fetch the model again",
                                 file.path.string(), file.bytes, bytes_max));
  }
  std::string text(static_cast<size_t>(file.bytes), '\0');
  read_bytes(file, 0, std::as_writable_bytes(std::span(text)));
  return parse_object(text, file.path.string());
}

/// The names of the files, and where the index says each tensor is: nothing for a single file.
std::vector<std::string> ModelFolder::weight_files(
    std::unordered_map<std::string, std::string>& index) const {
  std::error_code error;
  if (fs::exists(fs::symlink_status(path_ / kSingle, error))) return {kSingle};
  if (!fs::exists(fs::symlink_status(path_ / kIndex, error))) {
    throw ModelError(fmt::format("{} has neither {} nor {}; only safetensors are read, never a pickle",
                                 path_.string(), kSingle, kIndex));
  }
  const Json found = read_json(kIndex, kIndexBytesMax);
  const auto map = found.find("weight_map");
  const std::string where = (path_ / kIndex).string();
  if (map == found.end() || !map->is_object() || map->empty())
    throw ModelError(fmt::format("{} has no weight_map; fetch the model again", where));
  std::set<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (fs::path(name).filename() != name || !name.ends_with(".safetensors")) {
      throw ModelError(
          fmt::format("{} names the file {:.80}; only safetensors files of the same folder are "
                      "read; fetch the model again",
                      where, file.dump(-1, ' ', false, Json::error_handler_t::replace)));
    }
    names.insert(name);
    index.emplace(tensor, name);
  }
  return {names.begin(), names.end()};
}

void ModelFolder::read_headers(const std::string& name) {
  File file = open(name);
  const std::string shown = file.path.string();
  std::string first(static_cast<size_t>(std::min(file.bytes, kHeaderLengthBytes)), '\0');
  read_bytes(file, 0, std::as_writable_bytes(std::span(first)));
  std::string text(static_cast<size_t>(header_bytes(first, file.bytes, shown)), '\0');
  read_bytes(file, kHeaderLengthBytes, std::as_writable_bytes(std::span(text)));
  for (StoredTensor& tensor : parse_header(text, file.bytes, shown)) {
    tensor.file = static_cast<int32_t>(files_.size());
    tensors_.push_back(std::move(tensor));
  }
  files_.push_back(std::move(file));
}

void ModelFolder::read_bytes(const File& file, int64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t count = io::read_some(file.fd.get(), to, offset, file.path);
    if (count < 0) throw io::system_error(io::Operation::read, file.path);
    if (count == 0) {
      throw ModelError(
          fmt::format("{} ends at byte {}, and was longer when it was opened; fetch the model "
                      "again",
                      file.path.string(), offset));
    }
    to = to.subspan(static_cast<size_t>(count));
    offset += count;
  }
}

}  // namespace overspill::inference
