"""Zero-shot and few-shot tasks: minimal pairs of sentences, multiple choice, cloze and exact match."""
