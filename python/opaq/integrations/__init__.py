"""Other people's libraries: each file is imported only by who uses that library."""
