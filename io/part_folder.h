// A part of a checkpoint on another file system than the checkpoint's folder: where a store has several
// paths, the slabs of each are linked where they lie, and none is copied. In the checkpoint's folder a small
// file, part-<id>.txt, has the part's path, so that who mounts its disk elsewhere can say so. In the part
// another one has the id, which tells it from a folder of somebody else's, and the checkpoint's path, for
// people.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace overspill::io {

inline constexpr std::string_view kPartPrefix = "part-", kPartSuffix = ".txt";

struct PartFolder {
  std::string id;  // 16 hexadecimal digits
  std::filesystem::path path;
};

/// Makes a part in `base` and, before that, its file in the checkpoint's folder, both durable but for the
/// entry in that folder. Throws StoreError and leaves nothing.
PartFolder make_part(const std::filesystem::path& checkpoint, const std::filesystem::path& base);

/// The parts that the files of a checkpoint's folder name, whether they are there or not.
std::vector<PartFolder> parts_of(const std::filesystem::path& checkpoint);

/// The part's path by the file of the checkpoint; empty where there is none.
std::filesystem::path part_path(const std::filesystem::path& checkpoint, std::string_view id);

/// Whether the folder is there and is this part.
bool is_part(const PartFolder& part);

/// Writes into each part that it belongs to the checkpoint at this path.
void note_owner(const std::filesystem::path& checkpoint) noexcept;

/// Removes the parts: files that `is_ours` accepts, then the folder; also one that a crash left empty, before
/// it had its id or after all else in it was removed. Leaves a part that another checkpoint has, too: one
/// that says that it is that one's, or a copy by hard links. Returns those that could not be removed.
std::vector<std::filesystem::path> remove_parts(const std::filesystem::path& checkpoint,
                                                bool (*is_ours)(std::string_view name));

/// Removes one that was just made, with the links in it.
void unmake_part(const std::filesystem::path& checkpoint, const PartFolder& part) noexcept;

/// Parts in `base` whose checkpoint is not where they say, or that a crash left without their id, in words
/// for people: they take room until somebody removes them.
std::vector<std::string> orphans(const std::filesystem::path& base);

}  // namespace overspill::io
