// The folder that a save fills: which names it holds, and how it is removed. Nothing that somebody else put
// there is removed, and no symbolic link is followed.
#pragma once

#include <filesystem>
#include <string_view>

#include "engine/checkpoint/manifest.h"
#include "io/unique_fd.h"

namespace overspill::engine {

/// The file with the states of an optimizer that runs its own code; Engine::save's caller writes it.
inline constexpr const char* kOwnStatesFile = "optimizer.safetensors";

/// Whether a save gives this name to a file: the manifest, memory's states, slabs, copied extents, marks, own
/// states; also behind a rank's prefix ("rank1-resident.bin"). The one list of them.
bool is_file_of_a_save(std::string_view name);

/// Throws CheckpointError, which names the entry, where the folder holds anything else than files of a save
/// and folders of ranks with such files, or is no folder itself. Changes nothing. No folder is fine.
void require_only_a_save(const std::filesystem::path& folder);

/// Another process saves there.
class SaveUnderWay : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// The folder, locked until the descriptor is closed; empty where there is none. Throws SaveUnderWay while
/// another save holds it, CheckpointError where it is no folder, or belongs to somebody else. A file system
/// without locks of folders lets everyone in.
io::UniqueFd hold_save(const std::filesystem::path& folder);

/// Removes the files of a save, the manifest first: what is left at any instant is no complete checkpoint.
/// Then removes the folder. Leaves everything else. Throws CheckpointError where the folder is still there.
void remove_save(const std::filesystem::path& folder);

}  // namespace overspill::engine
