//! Opening models and reading their weights: every family, every source, and files that lie.

mod config;
mod dummy;
mod folder;
mod fuzz;
mod gguf;
mod support;
