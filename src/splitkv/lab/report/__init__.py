"""Tables, pictures and pages from the records of the lab."""
