//! Products by cuBLASLt: outputs (rows, outputs) = inputs (rows, inputs) · weights (outputs, inputs)ᵀ, bf16 in (f16 where
//! the device has no bf16), f32 sums.
//!
//! **Bits.** Algorithms with split-K cut a sum by the number of rows; they are left out. All others that the library
//! offers gave the same bits as each other wherever it was measured, so each number of rows takes the fastest
//! (`choice.rs`).

use super::device::{CudaDevice, Half};
use crate::ComputeError;
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::CudaSlice;
use half::bf16;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

/// Memory that an algorithm may use.
const WORKSPACE_BYTES: usize = 64 << 20;
/// The library's name for a transposed operand, `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// One of the library's ways to multiply.
pub(super) use sys::cublasLtMatmulAlgo_t as Algorithm;

/// Room for an algorithm that the library proposes.
const NOTHING_FOUND: sys::cublasLtMatmulHeuristicResult_t = sys::cublasLtMatmulHeuristicResult_t {
    algo: Algorithm { data: [0; 8] },
    workspaceSize: 0,
    state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
    wavesCount: 0.0,
    reserved: [0; 4],
};

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Into {
    /// Rounded to 16 bits.
    Half,
    /// Kept as f32.
    F32,
    /// Added to what is there, f32.
    AddF32,
}

/// A product's shape but for its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) into: Into,
}

impl Shape {
    pub(super) fn weight_bytes(&self) -> usize {
        self.outputs * self.inputs * size_of::<bf16>()
    }
}

/// Addresses on the device of a product's three matrices.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) weights: u64,
    pub(super) inputs: u64,
    pub(super) outputs: u64,
}

/// The library, its workspace, and what was found best.
pub(super) struct Products {
    pub(super) device: CudaDevice,
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    workspace_address: u64,
    /// By shape and number of rows, rounded up to a step.
    algorithms: HashMap<(Shape, usize), Algorithm>,
    plans: HashMap<(Shape, usize), Plan>,
}

// SAFETY: the library's handles may be used from any thread, one at a time.
unsafe impl Send for Products {}

/// Descriptors of a shape with exactly so many rows.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    inputs: sys::cublasLtMatrixLayout_t,
    outputs: sys::cublasLtMatrixLayout_t,
}

impl Products {
    pub(super) fn new(device: &CudaDevice) -> Result<Self, ComputeError> {
        let handle = lt::create_handle()
            .map_err(|error| device.error("start cuBLASLt", error.to_string()))?;
        let workspace = device
            .stream
            .alloc_zeros(WORKSPACE_BYTES)
            .map_err(device.failed("allocate the products' workspace"))?;
        let workspace_address = super::weights::address(&workspace, device);
        Ok(Self {
            device: device.clone(),
            handle,
            workspace,
            workspace_address,
            algorithms: HashMap::new(),
            plans: HashMap::new(),
        })
    }

    /// The library's version, and what it is given.
    pub(super) fn description(&self) -> String {
        // SAFETY: the library is loaded, and takes nothing.
        let version = unsafe { sys::cublasLtGetVersion() };
        format!("cuBLASLt {version} with {WORKSPACE_BYTES} bytes")
    }

    /// Sets the algorithm for a step's number of rows.
    pub(super) fn choose(&mut self, shape: Shape, rows: usize, algorithm: Algorithm) {
        self.algorithms.insert((shape, step_of(rows)), algorithm);
    }

    /// Queues a product.
    pub(super) fn multiply(
        &mut self,
        shape: Shape,
        rows: usize,
        operands: Operands,
    ) -> Result<(), ComputeError> {
        let algorithm = self.chosen(shape, rows);
        self.run(shape, rows, operands, &algorithm)
    }

    /// The algorithm for a product.
    pub(super) fn chosen(&self, shape: Shape, rows: usize) -> Algorithm {
        let algorithm = self.algorithms.get(&(shape, step_of(rows))).copied();
        algorithm.expect("every shape was tuned for all its rows")
    }

    pub(super) fn run(
        &mut self,
        shape: Shape,
        rows: usize,
        operands: Operands,
        algorithm: &Algorithm,
    ) -> Result<(), ComputeError> {
        self.plan(shape, rows)?;
        let plan = &self.plans[&(shape, rows)];
        let one = 1.0f32;
        let before = if shape.into == Into::AddF32 { 1.0f32 } else { 0.0 };
        // SAFETY: the operands hold (rows, inputs), (outputs, inputs) and (rows, outputs) values of the plan's types;
        // the descriptors live in `self.plans`.
        let multiplied = unsafe {
            lt::matmul(
                self.handle,
                plan.product,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&before).cast(),
                operands.weights as *const c_void,
                plan.weights,
                operands.inputs as *const c_void,
                plan.inputs,
                operands.outputs as *const c_void,
                plan.outputs,
                operands.outputs as *mut c_void,
                plan.outputs,
                algorithm,
                self.workspace_address as *mut c_void,
                self.workspace.len(),
                self.device.stream.cu_stream().cast(),
            )
        };
        multiplied.map_err(|error| self.failed(shape, rows, error))
    }

    /// The library's first proposals, likeliest first, without those that split a sum.
    pub(super) fn proposed(
        &mut self,
        shape: Shape,
        rows: usize,
        proposals: usize,
    ) -> Result<Vec<Algorithm>, ComputeError> {
        self.plan(shape, rows)?;
        let plan = &self.plans[&(shape, rows)];
        let mut found = vec![NOTHING_FOUND; proposals];
        let mut count = 0;
        let asked = (|| {
            let preference = lt::create_matmul_pref()?;
            let no_reduction = 0u32;
            // SAFETY: the attributes have the types that the library documents; the descriptors live in `self.plans`.
            unsafe {
                use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
                let workspace = self.workspace.len() as u64;
                let set = lt::set_matmul_pref_attribute(
                    preference,
                    Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    ptr::from_ref(&workspace).cast(),
                    size_of::<u64>(),
                )
                .and_then(|()| {
                    lt::set_matmul_pref_attribute(
                        preference,
                        Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                        ptr::from_ref(&no_reduction).cast(),
                        size_of::<u32>(),
                    )
                })
                .and_then(|()| {
                    sys::cublasLtMatmulAlgoGetHeuristic(
                        self.handle,
                        plan.product,
                        plan.weights,
                        plan.inputs,
                        plan.outputs,
                        plan.outputs,
                        preference,
                        proposals as i32,
                        found.as_mut_ptr(),
                        &mut count,
                    )
                    .result()
                });
                lt::destroy_matmul_pref(preference)?;
                set
            }
        })();
        asked.map_err(|error: CublasError| self.failed(shape, rows, error))?;
        found.truncate(count as usize);
        found.retain(|result| result.state.result().is_ok() && !splits(&result.algo));
        Ok(found.into_iter().map(|result| result.algo).collect())
    }

    /// Makes the descriptors of a shape with so many rows, once.
    fn plan(&mut self, shape: Shape, rows: usize) -> Result<(), ComputeError> {
        if self.plans.contains_key(&(shape, rows)) {
            return Ok(());
        }
        let plan = Plan::new(shape, rows, self.device.half)
            .map_err(|error| self.failed(shape, rows, error))?;
        self.plans.insert((shape, rows), plan);
        Ok(())
    }

    fn failed(&self, shape: Shape, rows: usize, error: CublasError) -> ComputeError {
        let what = format!("multiply {rows} rows by {} x {}", shape.outputs, shape.inputs);
        self.device.error(&what, error.to_string())
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: nothing uses the handle or the descriptors any more; what cannot be freed is left.
        unsafe {
            for plan in self.plans.values() {
                _ = lt::destroy_matmul_desc(plan.product);
                for layout in [plan.weights, plan.inputs, plan.outputs] {
                    _ = lt::destroy_matrix_layout(layout);
                }
            }
            _ = lt::destroy_handle(self.handle);
        }
    }
}

impl Plan {
    /// The library thinks in columns: a row-major (rows, width) is a column-major (width, rows).
    fn new(shape: Shape, rows: usize, half: Half) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        let product =
            lt::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F)?;
        let transposed = TRANSPOSED;
        // SAFETY: the attribute's value is an operation, 32 bits.
        unsafe {
            lt::set_matmul_desc_attribute(
                product,
                CUBLASLT_MATMUL_DESC_TRANSA,
                ptr::from_ref(&transposed).cast(),
                size_of_val(&transposed),
            )?;
        }
        let (outputs, inputs, rows) = (shape.outputs as u64, shape.inputs as u64, rows as u64);
        let half = if half == Half::F16 { CUDA_R_16F } else { CUDA_R_16BF };
        let result = if shape.into == Into::Half { half } else { CUDA_R_32F };
        Ok(Self {
            product,
            weights: lt::create_matrix_layout(half, inputs, outputs, inputs as i64)?,
            inputs: lt::create_matrix_layout(half, inputs, rows, inputs as i64)?,
            outputs: lt::create_matrix_layout(result, outputs, rows, outputs as i64)?,
        })
    }
}

/// Whether an algorithm cuts a sum into parts.
pub(super) fn splits(algorithm: &Algorithm) -> bool {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let attribute = |attribute| {
        let (mut value, mut written) = (0i32, 0);
        // SAFETY: both attributes are 32 bits.
        let status = unsafe {
            sys::cublasLtMatmulAlgoConfigGetAttribute(
                algorithm,
                attribute,
                ptr::from_mut(&mut value).cast(),
                size_of::<i32>(),
                &mut written,
            )
        };
        status.result().map_or(0, |()| value)
    };
    attribute(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1
        || attribute(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) != 0
}

/// Numbers of rows that share an algorithm: up to 16, then four steps to each doubling.
pub(super) fn step_of(rows: usize) -> usize {
    if rows <= 16 {
        return 16;
    }
    let quarter = (rows - 1).ilog2().saturating_sub(2);
    rows.next_multiple_of(1 << quarter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_grow_with_the_rows() {
        let cases =
            [(1, 16), (16, 16), (17, 20), (33, 40), (64, 64), (65, 80), (256, 256), (257, 320)];
        for (rows, step) in cases {
            assert_eq!(step_of(rows), step, "{rows} rows");
        }
    }
}
