//! Engines that build a filesystem in RAM (placeholder until the next commit).
