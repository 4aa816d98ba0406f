"""The public Python API: functions with typed signatures that call :mod:`autotune.app`, and their results."""
