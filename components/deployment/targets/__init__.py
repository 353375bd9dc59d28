"""Where a champion is put into use."""
