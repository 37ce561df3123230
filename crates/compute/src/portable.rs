//! The oracle: plain loops in f32 over unpacked weights and pages. Every other backend is tested
//! against this one.

mod context;
mod product;
mod weights;

pub(crate) use context::PortableContext;
pub(crate) use weights::PortableWeights;
