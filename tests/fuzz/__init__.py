"""Random calls of every public function against a definition written apart: `python -m fuzz`."""
