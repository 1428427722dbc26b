"""One file a question; imports the library, nothing imports it."""
