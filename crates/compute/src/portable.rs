//! The oracle: plain loops in f32 over weights and pages as they come. Every other backend is
//! tested against this one.

mod context;
mod product;
mod weights;

pub(crate) use context::PortableContext;
pub(crate) use weights::PortableWeights;
