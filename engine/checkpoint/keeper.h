// Takes and opens checkpoints of one engine (DESIGN 7): what lies on NVMe is pinned and linked, not copied;
// what lies on the host is written out.
//
// The updater is quiescent meanwhile. A checkpoint is made under "<folder>.partial" and renamed when it is
// complete and durable, so the folder is there whole or not at all. Its extents stay pinned as long as the
// folder's manifest exists somewhere: an open descriptor tells, also after the folder was moved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "engine/access.h"
#include "engine/checkpoint/manifest.h"
#include "engine/schedule/context.h"

namespace overspill::engine {

class CheckpointKeeper {
 public:
  explicit CheckpointKeeper(Context& context) : context_(context) {}
  CheckpointKeeper(const CheckpointKeeper&) = delete;
  CheckpointKeeper& operator=(const CheckpointKeeper&) = delete;
  ~CheckpointKeeper();

  /// Throws CheckpointError when the folder holds something, io::StoreError when the disk fails or is full;
  /// then nothing is left behind.
  void save(const std::filesystem::path& folder, int64_t steps, int64_t skipped_steps,
            std::string_view extra_json);

  /// Reads everything once: the manifest fits this model, every checksum fits. Throws CheckpointError naming
  /// what does not.
  Manifest verify(const std::filesystem::path& folder) const;

  /// Brings a verified checkpoint's weights, states and step counts home.
  void load(const std::filesystem::path& folder, const Manifest& manifest, Access& access);

 private:
  struct Kept {
    int manifest_fd = -1;
    std::vector<io::Extent> extents;
  };

  void forget_deleted();
  std::vector<io::Extent> pin_all();
  void unpin(const std::vector<io::Extent>& extents) noexcept;
  Manifest write_folder(const std::filesystem::path& folder, const std::vector<io::Extent>& extents) const;

  Context& context_;
  std::vector<Kept> kept_;
};

}  // namespace overspill::engine
