// The folder that a save fills: which names it holds, and how it is removed. Nothing that somebody else put
// there is removed, and no symbolic link is followed.
#pragma once

#include <filesystem>
#include <string_view>

#include "engine/checkpoint/manifest.h"
#include "io/unique_fd.h"

namespace overspill::engine {

/// States of an optimizer that the engine does not implement; the caller of Engine::save writes this file.
inline constexpr const char* kOwnStatesFile = "optimizer.safetensors";

/// Whether a save gives this name to a file: the manifest, memory's states, slabs, copied extents, marks, own
/// states; also behind a rank's prefix ("rank1-resident.bin"). The one list of them.
bool is_file_of_a_save(std::string_view name);

/// "rank1-" of the name of a file that rank 1 of several wrote; empty of another name.
std::string_view rank_prefix(std::string_view name);

/// Throws CheckpointError, which names the entry, where the folder holds anything but files of a save and
/// folders of ranks with such files, or where the path is no folder. A path that does not exist is accepted.
/// Changes nothing.
void require_only_a_save(const std::filesystem::path& folder);

/// Another process saves there.
class SaveUnderWay : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// The folder, locked until the descriptor is closed; empty where there is none. Throws SaveUnderWay while
/// another save holds it, CheckpointError where it is no folder, or belongs to somebody else. On a file
/// system that cannot lock folders nothing is locked and no save is refused.
io::UniqueFd hold_save(const std::filesystem::path& folder);

/// Removes the files of a save, the manifest first: what is left at any instant is no complete checkpoint.
/// Then removes the folder. Leaves everything else. Throws CheckpointError where the folder is still there.
void remove_save(const std::filesystem::path& folder);

}  // namespace overspill::engine
