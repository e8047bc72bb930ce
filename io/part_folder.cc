#include "io/part_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <system_error>

#include "io/files.h"
#include "io/owned_folder.h"
#include "io/unique_fd.h"

namespace overspill::io {
namespace {

constexpr const char* kIdFile = "overspill-part.txt";
constexpr const char* kUnfinishedIdFile = "overspill-part.txt.tmp";
constexpr std::string_view kFolderPrefix = "checkpoint-", kFolderSuffix = ".overspill";
constexpr size_t kIdDigits = 16;
constexpr size_t kTextMax = 8192;

bool is_id(std::string_view id) {
  return id.size() == kIdDigits &&
         std::ranges::all_of(id, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string new_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

/// What lies between the two; empty where the name is another.
std::string_view between(std::string_view name, std::string_view begin, std::string_view end) {
  if (name.size() < begin.size() + end.size() || !name.starts_with(begin) || !name.ends_with(end)) return {};
  return name.substr(begin.size(), name.size() - begin.size() - end.size());
}

std::vector<std::string> lines_of(int folder, const std::string& name) {
  const UniqueFd file(::openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  std::string text(kTextMax, '\0');
  const ssize_t got = file ? ::pread(file.get(), text.data(), text.size(), 0) : -1;
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  std::vector<std::string> lines;
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(text.substr(begin, end - begin));
  return lines;
}

/// A checkpoint may be named by a link.
UniqueFd open_checkpoint(const std::filesystem::path& path) {
  return UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

UniqueFd open_no_link(const std::filesystem::path& path) {
  return UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

/// The name that the folder of a save will have: "<folder>.partial", or a rank's folder in it, while it is
/// filled.
std::filesystem::path final_name(std::filesystem::path folder) {
  constexpr std::string_view kUnfinished = ".partial";
  if (folder.extension() != kUnfinished && folder.parent_path().extension() == kUnfinished)
    folder = folder.parent_path();
  return folder.extension() == kUnfinished ? folder.replace_extension() : folder;
}

void write_durably(const std::filesystem::path& path, const std::string& text) {
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file || ::pwrite(file.get(), text.data(), text.size(), 0) != std::ssize(text) ||
      ::fdatasync(file.get()) != 0) {
    const StoreError error = system_error(Operation::write, path);
    if (file) ::unlink(path.c_str());
    throw error;
  }
}

std::string text_of_part(const std::string& id, const std::filesystem::path& owner) {
  return fmt::format(
      "{}\n{}\nThis folder is a part of the checkpoint named above, and nothing without it. `overspill "
      "checkpoint "
      "rm` and `mv` of that checkpoint take care of it.\n",
      id, owner.string());
}

std::filesystem::path name_of(const std::filesystem::path& checkpoint, std::string_view id) {
  return checkpoint / fmt::format("{}{}{}", kPartPrefix, id, kPartSuffix);
}

/// Whether the folder can be listed, and has no other names.
bool has_only(int folder, std::string_view allowed) {
  const std::vector<std::string> names =
      names_in(folder, "");  // at least "." and ".." where it can be listed
  return !names.empty() && std::ranges::all_of(names, [&](const std::string& name) {
    return name == "." || name == ".." || name == allowed;
  });
}

bool has_made_name(const PartFolder& part) {
  const std::string name = part.path.filename();
  return between(name, kFolderPrefix, kFolderSuffix) == part.id;
}

/// The part's folder, held by a descriptor; empty where the path has something else.
UniqueFd open_part(const PartFolder& part) {
  UniqueFd folder = open_no_link(part.path);
  if (!folder) return {};
  const std::vector<std::string> lines = lines_of(folder.get(), kIdFile);
  if (lines.empty() || lines[0] != part.id) return {};
  return folder;
}

/// Whether a crash can have left the folder while it was made or removed: it has the name that make_part gave
/// it, no id, and nothing else.
bool is_remnant(const PartFolder& part, int folder) {
  return has_made_name(part) && has_only(folder, kUnfinishedIdFile);
}

void remove_remnant(const PartFolder& part) {
  const UniqueFd folder = open_no_link(part.path);
  if (!folder || !is_remnant(part, folder.get())) return;
  ::unlinkat(folder.get(), kUnfinishedIdFile, 0);
  ::rmdir(part.path.c_str());  // which leaves a folder that has got its id meanwhile
}

bool same_folder(const std::filesystem::path& one, const std::filesystem::path& other) {
  std::error_code ignored;
  return std::filesystem::equivalent(one, other, ignored);
}

/// Whether another checkpoint than this one has the part: it was copied with links, or its file was.
bool is_of_another(const std::filesystem::path& checkpoint, const PartFolder& part, int folder) {
  struct stat status {};
  if (::lstat(name_of(checkpoint, part.id).c_str(), &status) == 0 && status.st_nlink > 1) return true;
  const std::vector<std::string> lines = lines_of(folder, kIdFile);
  if (lines.size() < 2 || same_folder(lines[1], checkpoint)) return false;
  return same_folder(part_path(lines[1], part.id), part.path);
}

/// Whether the folder of a save that is under way, or was cut off, names the part, or a rank's folder in it.
bool is_in_a_save(const std::filesystem::path& partial, const PartFolder& part) {
  if (same_folder(part_path(partial, part.id), part.path)) return true;
  const UniqueFd folder = open_checkpoint(partial);
  return folder && std::ranges::any_of(names_in(folder.get(), "rank"), [&](const std::string& rank) {
           return same_folder(part_path(partial / rank, part.id), part.path);
         });
}

}  // namespace

PartFolder make_part(const std::filesystem::path& checkpoint, const std::filesystem::path& base) {
  const std::string id = new_id();
  PartFolder part{id,
                  std::filesystem::absolute(base) / fmt::format("{}{}{}", kFolderPrefix, id, kFolderSuffix)};
  write_durably(name_of(checkpoint, id), part.path.string() + '\n');
  if (::mkdir(part.path.c_str(), 0700) != 0) {
    const StoreError error = system_error(Operation::open, part.path);
    ::unlink(name_of(checkpoint, id).c_str());
    throw error;
  }
  try {
    // By its name it has all of the id, or none: a part is told from what a crash left of one.
    write_durably(part.path / kUnfinishedIdFile, text_of_part(id, final_name(checkpoint)));
    if (::rename((part.path / kUnfinishedIdFile).c_str(), (part.path / kIdFile).c_str()) != 0)
      throw system_error(Operation::write, part.path / kIdFile);
    sync_folder(base);
  } catch (...) {
    unmake_part(checkpoint, part);
    throw;
  }
  return part;
}

void unmake_part(const std::filesystem::path& checkpoint, const PartFolder& part) noexcept {
  std::error_code ignored;
  std::filesystem::remove_all(part.path, ignored);
  ::unlink(name_of(checkpoint, part.id).c_str());
}

std::vector<PartFolder> parts_of(const std::filesystem::path& checkpoint) {
  std::vector<PartFolder> parts;
  const UniqueFd folder = open_checkpoint(checkpoint);
  if (!folder) return parts;
  for (const std::string& name : names_in(folder.get(), kPartPrefix)) {
    const std::string_view id = between(name, kPartPrefix, kPartSuffix);
    const std::vector<std::string> lines = lines_of(folder.get(), name);
    if (is_id(id) && !lines.empty() && lines[0].starts_with('/'))
      parts.push_back({std::string(id), lines[0]});
  }
  return parts;
}

std::filesystem::path part_path(const std::filesystem::path& checkpoint, std::string_view id) {
  if (!is_id(id)) return {};
  const UniqueFd folder = open_checkpoint(checkpoint);
  if (!folder) return {};
  const std::vector<std::string> lines =
      lines_of(folder.get(), fmt::format("{}{}{}", kPartPrefix, id, kPartSuffix));
  if (lines.empty() || !lines[0].starts_with('/')) return {};
  return lines[0];
}

bool is_part(const PartFolder& part) {
  return static_cast<bool>(open_part(part));
}

void note_owner(const std::filesystem::path& checkpoint) noexcept {
  try {
    for (const PartFolder& part : parts_of(checkpoint)) {
      const UniqueFd folder = open_part(part);
      if (!folder) continue;
      const std::string text = text_of_part(part.id, checkpoint);
      const UniqueFd file(::openat(folder.get(), kIdFile, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
      // For people: whatever becomes of it, the id stays.
      if (file && ::pwrite(file.get(), text.data(), text.size(), 0) == std::ssize(text))
        static_cast<void>(::ftruncate(file.get(), std::ssize(text)) == 0 && ::fdatasync(file.get()) == 0);
    }
  } catch (const std::exception&) {
  }
}

std::vector<std::filesystem::path> remove_parts(const std::filesystem::path& checkpoint,
                                                bool (*is_ours)(std::string_view name)) {
  std::vector<std::filesystem::path> stay;
  for (const PartFolder& part : parts_of(checkpoint)) {
    const UniqueFd folder = open_part(part);
    if (!folder) {  // removed already, by a removal that was cut off, or another's
      remove_remnant(part);
      continue;
    }
    if (is_of_another(checkpoint, part, folder.get())) continue;
    for (const std::string& name : names_in(folder.get(), "")) {
      if (is_ours(name)) ::unlinkat(folder.get(), name.c_str(), 0);
    }
    // The id goes last: what is left at any instant can be removed again.
    const bool empty = has_only(folder.get(), kIdFile);
    if (empty) ::unlinkat(folder.get(), kIdFile, 0);
    if (!empty || ::rmdir(part.path.c_str()) != 0) stay.push_back(part.path);
  }
  return stay;
}

std::vector<std::string> orphans(const std::filesystem::path& base) {
  std::vector<std::string> found;
  const UniqueFd folder(::open(base.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return found;
  for (const std::string& name : names_in(folder.get(), kFolderPrefix)) {
    const std::string_view id = between(name, kFolderPrefix, kFolderSuffix);
    const UniqueFd part = is_id(id) ? open_folder(folder.get(), name) : UniqueFd();
    if (!part) continue;
    const std::vector<std::string> lines = lines_of(part.get(), kIdFile);
    if (is_remnant({std::string(id), base / name}, part.get())) {
      found.push_back(
          fmt::format("{} has no data of a checkpoint: a save or a removal made or emptied it, and has not "
                      "finished. If none is under way, remove the folder",
                      (base / name).string()));
      continue;
    }
    if (lines.size() < 2 || lines[0] != id) {
      found.push_back(fmt::format(
          "{} was a part of a checkpoint, and a crash while that was saved or removed has left it "
          "without its {}: no checkpoint opens with it. It takes room until it is removed; unless "
          "a save is under way, remove it",
          (base / name).string(), kIdFile));
      continue;
    }
    if (same_folder(part_path(lines[1], id), base / name)) continue;
    if (is_in_a_save(lines[1] + ".partial", {std::string(id), base / name})) continue;
    found.push_back(
        fmt::format("{} is a part of the checkpoint {}, which is not there. It takes room until it is "
                    "removed; if that checkpoint was moved, leave it",
                    (base / name).string(), lines[1]));
  }
  return found;
}

}  // namespace overspill::io
