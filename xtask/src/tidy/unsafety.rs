//! `unsafe` stays in the modules made for it, and each use says why it is sound.

use std::path::Path;

use super::Finding;
use super::source::{line_of, words};

/// A reason this many lines above still belongs to the block.
const REACH: usize = 5;

/// Modules and folders made for it: mapping of base weights, views of checked spans, and where a
/// backend meets its driver. The twin plays a C library and is all of it.
const HOMES: &[&str] = &[
    "model/src/files.rs",
    "backend-cpu/src/memory.rs",
    "backend-cuda/src/driver",
    "backend-cuda/src/launch.rs",
    "backend-cuda/src/blas.rs",
    "backend-ascend/src/sys",
    "backend-ascend/src/driver",
    "backend-ascend/src/library.rs",
    "backend-ascend/src/aclnn.rs",
    "ascend-twin",
];

/// The homes, and the vector instructions of the CPU backend. No other module.
fn allowed(file: &Path) -> bool {
    let names = |part: &str| part == "simd" || part.starts_with("simd_") || part.ends_with("_simd");
    let vector = file.starts_with("backend-cpu/src")
        && file.with_extension("").iter().any(|part| part.to_str().is_some_and(names));
    vector || HOMES.iter().any(|home| file.starts_with(home))
}

/// `code` is `contents` without comments and literals.
pub(super) fn check(file: &Path, contents: &str, code: &str) -> Vec<Finding> {
    let lines: Vec<&str> = contents.lines().collect();
    let mut findings = Vec::new();
    for at in words(code, "unsafe") {
        let line = line_of(code, at);
        if !allowed(file) {
            let message = "unsafe outside the modules made for it";
            findings.push(Finding::error(file, line, message));
        } else if !is_explained_elsewhere(code, at) && !explained(&lines[..line]) {
            let message = "unsafe without a SAFETY comment or a Safety section";
            findings.push(Finding::error(file, line, message));
        }
    }
    findings
}

/// A pointer type does nothing unsafe, and a method of a trait has its contract at the trait.
fn is_explained_elsewhere(code: &str, at: usize) -> bool {
    let rest = code[at..].trim_start_matches("unsafe").trim_start();
    let rest = rest.strip_prefix("extern").map_or(rest, str::trim_start);
    let Some(name) = rest.strip_prefix("fn") else {
        return false;
    };
    let header = enclosing_header(&code[..at]);
    let of_trait = ["impl", "for"].iter().all(|word| words(header, word).next().is_some());
    name.trim_start().starts_with('(') || of_trait
}

/// What stands before the brace that is still open at the end of `code`.
fn enclosing_header(code: &str) -> &str {
    let mut depth = 0;
    let open = code.rfind(|c| {
        depth += match c {
            '}' => 1,
            '{' => -1,
            _ => 0,
        };
        depth < 0
    });
    let before = &code[..open.unwrap_or(0)];
    // The semicolon of an array type, `[f32; 8]`, ends no statement.
    let mut brackets = 0;
    let end = before.rfind(|c| {
        brackets += match c {
            ']' => 1,
            '[' => -1,
            _ => 0,
        };
        matches!(c, '{' | '}') || (c == ';' && brackets == 0)
    });
    &before[end.map_or(0, |end| end + 1)..]
}

/// Whether the last of `lines` has its reason in it, a few lines above, or anywhere in the comment
/// that stands directly above.
fn explained(lines: &[&str]) -> bool {
    let says = |line: &&str| {
        line.split_once("//")
            .is_some_and(|(_, comment)| comment.contains("SAFETY:") || comment.contains("# Safety"))
    };
    let attached = lines
        .iter()
        .rev()
        .skip(1)
        .take_while(|line| ["//", "#["].iter().any(|mark| line.trim().starts_with(mark)))
        .count();
    lines.iter().rev().take(1 + REACH.max(attached)).any(says)
}

#[cfg(test)]
mod tests {
    use super::super::source::code_only;
    use super::*;

    fn findings(file: &str, contents: &str) -> Vec<Finding> {
        check(Path::new(file), contents, &code_only(contents))
    }

    #[test]
    fn unsafe_outside_its_modules_is_found() {
        let planted = "// SAFETY: a reason\nunsafe { f() }";
        for file in [
            "hal/src/lib.rs",
            "engine/src/kv.rs",
            "server/src/main.rs",
            "model/src/weights.rs",
            "backend-cpu/src/ops/linear.rs",
            "tests/src/harness.rs",
        ] {
            assert_eq!(findings(file, planted)[0].line, 2, "{file}");
        }
        for file in [
            "model/src/files.rs",
            "backend-cpu/src/memory.rs",
            "backend-cpu/src/product/simd.rs",
            "backend-cpu/src/simd/avx512.rs",
            "backend-cpu/src/dot_simd.rs",
        ] {
            assert!(findings(file, planted).is_empty(), "{file}");
        }
    }

    #[test]
    fn unsafe_without_a_reason_is_found() {
        let file = "backend-cpu/src/memory.rs";
        for planted in [
            "unsafe { f() }",
            "unsafe impl Send for X {}",
            "/// Does it.\npub unsafe fn f() {}",
            "// SAFETY: too far away\n\n\n\n\n\n\nunsafe { f() }",
            "let reason = \"SAFETY: in a string\";\nunsafe { f() }",
        ] {
            assert_eq!(findings(file, planted).len(), 1, "{planted}");
        }
        let long =
            format!("/// # Safety\n{}#[inline]\npub unsafe fn f() {{}}", "/// More.\n".repeat(9));
        for reason in [
            "// SAFETY: checked above\nunsafe { f() }",
            "// SAFETY: one owner\nunsafe impl Send for X {}",
            &long,
        ] {
            assert_eq!(findings(file, reason), [], "{reason}");
        }
    }

    #[test]
    fn trait_methods_and_pointer_types_have_their_contract_elsewhere() {
        let file = "backend-cpu/src/simd.rs";
        let method = "impl<T> Lanes<T> for X {\n    unsafe fn load() { g(|| {}) }\n}";
        assert_eq!(findings(file, method), []);
        let array = "impl<const N: usize> Lanes for [f32; N] {\n    unsafe fn load() {}\n}";
        assert_eq!(findings(file, array), []);
        let inherent = "impl X {\n    unsafe fn load() {}\n}";
        assert_eq!(findings(file, inherent).len(), 1);
        let block = "impl Lanes for X {\n    fn load() { unsafe { g() } }\n}";
        assert_eq!(findings(file, block).len(), 1);
        let planted = "unsafe impl Lanes for X {}";
        assert_eq!(findings(file, planted).len(), 1);
        let pointer = "type F = unsafe extern \"C\" fn(i32);";
        assert_eq!(findings(file, pointer), []);
    }

    #[test]
    fn the_word_in_prose_is_no_use() {
        assert!(findings("hal/src/lib.rs", "//! No unsafe.\n#![forbid(unsafe_code)]").is_empty());
    }
}
