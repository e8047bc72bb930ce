// Folders in places where other users may write, too. A path is used only if it is a real folder that belongs
// to this user and that nobody else can change. All work in it goes through its descriptor.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/unique_fd.h"

namespace overspill::io {

/// A descriptor for calls relative to the folder. Throws StoreError saying what else is there.
UniqueFd open_base(const std::filesystem::path& path);

/// The folder `name` in `base`, links not followed. Empty with errno where it cannot be opened.
UniqueFd open_folder(int base, const std::string& name);

/// Why a folder of `base` is not this user's: "" where it is. Some file systems give what a user makes to
/// another one; then it is that one's.
std::string foreign(int base, int folder);

/// Why a folder of `base` that was found there must not be used: "" where it looks like one that this process
/// would make there itself.
std::string distrust(int base, int folder);

/// What `name` in `base` is, where it is no folder: "a symbolic link", "a file".
std::string kind_of_entry(int base, const std::string& name);

/// The names in a folder that begin so; none where it cannot be read.
std::vector<std::string> names_in(int folder, std::string_view prefix);

/// Whether `name` in the folder is a name of the open file, and that file is a regular one.
bool same_regular_file(int fd, int folder, const char* name);

}  // namespace overspill::io
