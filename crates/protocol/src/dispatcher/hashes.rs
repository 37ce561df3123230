//! Hashes of tokens. Whoever finds something by one compares the tokens too, or can bear to be wrong.

/// The hash of what has this hash and then a token.
pub(super) fn hash_on(hash: u64, token: u32) -> u64 {
    let hash = (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ (hash >> 29)
}

/// A hash of the tokens up to the end of each full page.
pub fn page_hashes(tokens: &[u32], page_positions: u32) -> Vec<u64> {
    let pages = tokens.chunks_exact(page_positions as usize);
    let mut hash = 0u64;
    pages
        .map(|page| {
            for &token in page {
                hash = hash_on(hash, token);
            }
            hash
        })
        .collect()
}
