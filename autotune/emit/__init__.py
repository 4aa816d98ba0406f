"""Writes the bundle: ``config.yaml`` for ``trl``, ``train.py`` for Python, ``result.json`` for programs."""
