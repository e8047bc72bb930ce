"""What scripts for DeepSpeed bring: its JSON (settings.py, by the table in keys.py) and its schedules
(lr_schedules.py)."""
