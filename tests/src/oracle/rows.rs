//! Operators that move rows: `write_tokens`, `embed`, `gather_rows`, `kv_write`, `copy_blocks`.

/// `out = table`, but `out[sequences + i] = prompt[i]`.
pub fn write_tokens(table: &[i32], sequences: usize, prompt: &[i32]) -> Vec<i32> {
    let mut out = table.to_vec();
    for (i, &token) in prompt.iter().enumerate() {
        out[sequences + i] = token;
    }
    out
}

/// `out[i] = weight[table[index[i]]]`, rows of `hidden`.
pub fn embed(index: &[i32], table: &[i32], weight: &[f64], hidden: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for &entry in index {
        let token = table[entry as usize] as usize;
        for h in 0..hidden {
            out.push(weight[token * hidden + h]);
        }
    }
    out
}

/// `out[i] = x[rows[i]]`, rows of `width`.
pub fn gather_rows(x: &[f64], rows: &[i32], width: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for &row in rows {
        for w in 0..width {
            out.push(x[row as usize * width + w]);
        }
    }
    out
}

/// `cache[kv_index[t]] = new[t]`, rows of `width`; negative entries write nothing.
pub fn kv_write(cache: &[f64], new: &[f64], kv_index: &[i32], width: usize) -> Vec<f64> {
    let mut out = cache.to_vec();
    for (t, &place) in kv_index.iter().enumerate() {
        if place < 0 {
            continue;
        }
        for w in 0..width {
            out[place as usize * width + w] = new[t * width + w];
        }
    }
    out
}

/// `cache[to] = cache[from]` for each pair, blocks of `width` elements; no block that is written is
/// in another pair.
pub fn copy_blocks(cache: &[f64], pairs: &[(usize, usize)], width: usize) -> Vec<f64> {
    let mut out = cache.to_vec();
    for &(from, to) in pairs {
        for w in 0..width {
            out[to * width + w] = cache[from * width + w];
        }
    }
    out
}
