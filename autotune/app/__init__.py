"""The use cases: each wires inspection, probing, planning, study and emission together for one public function."""
