"""CosyVoice text-to-speech: one file a part, and one that puts a version's parts together."""
