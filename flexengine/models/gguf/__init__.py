"""Models in GGUF files, as llama.cpp and Ollama have them: read into a Hugging Face folder, and written from one."""
