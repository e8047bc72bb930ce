"""What forward saves for backward: kept in the engine's memory and on disks, computed again, divided among ranks; and
the memory of the whole process beside its budget."""
