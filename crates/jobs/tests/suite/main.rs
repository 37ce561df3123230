//! The tests of jobs. They are one binary, because one for each file takes longer to compile.

mod common;
mod displaced;
mod earlier;
mod fuzz;
mod logprobs;
mod requests;
mod results;
mod resume;
mod survey;
mod tokens;
