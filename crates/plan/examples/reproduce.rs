//! Writes `docs/reproduction.md` and its plots, and prints the comparison.

use std::path::Path;

use glinthawk_plan::PlanError;
use glinthawk_plan::reproduce::Reproduction;

fn main() -> Result<(), PlanError> {
    let reproduction = Reproduction::run()?;
    print!("{}", reproduction.render());
    reproduction.write(Path::new(&std::env::args().nth(1).unwrap_or_else(|| "docs".to_owned())))
}
