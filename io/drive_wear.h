// Reads an NVMe drive's SMART log from the kernel, without tools: how worn the drive says it is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace overspill::io {

struct DriveWear {
  int percentage_used = 0;    // of the endurance its maker rates it for; may pass 100
  int64_t written_bytes = 0;  // by the host, over its life
};

/// From a SMART / Health Information log page (NVMe Base Specification 2.0, 5.16.1.3); empty where it is
/// shorter than its 512 bytes.
std::optional<DriveWear> parse_smart_log(std::span<const std::byte> page);

/// Of a disk ("nvme0n1"). Empty, and `why` says the reason, for other drives, and without the right to ask
/// (root).
std::optional<DriveWear> read_drive_wear(const std::string& disk, std::string& why);

}  // namespace overspill::io
