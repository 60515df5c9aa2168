//! Which files a unit reads: what a name in the cache of compiled kernels has to tell apart.

use crate::File;

/// The files of `files` that `text` includes, itself or through others, in the order of `files`.
///
/// Whatever stands behind the word `include`, in quotes or angle brackets, is taken, in comments and
/// behind conditions too: the set may be larger than what a compiler reads, and never smaller. Names
/// that are not in `files` are passed over (a test holds that no embedded file has such a name).
pub fn included<'a>(files: &'a [File], text: &str) -> Vec<&'a File> {
    let mut reached = vec![false; files.len()];
    let mut texts = vec![text];
    while let Some(text) = texts.pop() {
        for name in names(text) {
            let Some(at) = files.iter().position(|file| file.name == name) else { continue };
            if !std::mem::replace(&mut reached[at], true) {
                texts.push(files[at].text);
            }
        }
    }
    files.iter().zip(reached).filter_map(|(file, reached)| reached.then_some(file)).collect()
}

/// What stands behind each `include` of a text, without its quotes or brackets.
fn names(text: &str) -> impl Iterator<Item = &str> {
    const WORD: &str = "include";
    text.match_indices(WORD).filter_map(|(at, _)| {
        // A backslash may carry a directive over to the next line.
        let blank = |c: char| c.is_whitespace() || c == '\\';
        let rest = text[at + WORD.len()..].trim_start_matches(blank);
        let (open, close) = if rest.starts_with('<') { ('<', '>') } else { ('"', '"') };
        let name = rest.strip_prefix(open)?;
        name.find(close).map(|end| &name[..end])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FILES, Source};

    const SOME: &[File] = &[
        File { name: "a.cuh", text: "#include \"c.cuh\"\n" },
        File { name: "b.cuh", text: "#include \"a.cuh\"\n#include \"b.cuh\"\n" },
        File { name: "c.cuh", text: "// nothing\n" },
        File { name: "d.cuh", text: "#include \"d.cuh\"\n" },
    ];

    fn of(text: &str) -> Vec<&'static str> {
        included(SOME, text).into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn files_behind_files_are_included_in_one_order() {
        assert_eq!(of("#include \"a.cuh\"\n"), ["a.cuh", "c.cuh"]);
        assert_eq!(of("#include \"c.cuh\"\n#include \"b.cuh\"\n"), ["a.cuh", "b.cuh", "c.cuh"]);
        assert_eq!(of("#include \"d.cuh\"\n"), ["d.cuh"]);
        assert!(of("#include \"other.cuh\"\nint a;\n").is_empty());
    }

    #[test]
    fn comments_conditions_and_spellings_only_add() {
        for text in [
            "// #include \"c.cuh\"\n",
            "/* #include \"c.cuh\" */\n",
            "#if 0\n#include \"c.cuh\"\n#endif\n",
            "#  include\t<c.cuh>\n",
            "#include \\\n  \"c.cuh\"\n",
            "  #include\"c.cuh\"",
            "#if __has_include(\"d.cuh\")\n#endif\n#include \"c.cuh\"\n",
        ] {
            assert_eq!(of(text), ["c.cuh"], "{text}");
        }
    }

    /// An include that nobody finds would be left out of names: none of a macro, a relative path or a
    /// header of anyone else is in an embedded file.
    #[test]
    fn every_directive_names_an_embedded_file() {
        for file in FILES {
            let directives = file.text.lines().filter(|line| {
                let line = line.trim_start().strip_prefix('#').map(str::trim_start);
                line.is_some_and(|line| line.starts_with("include"))
            });
            for line in directives {
                let found: Vec<_> = names(line).collect();
                let embedded = |name: &&str| FILES.iter().any(|f| f.name == *name);
                assert!(found.len() == 1 && found.iter().all(embedded), "{}: {line}", file.name);
            }
        }
    }

    #[test]
    fn every_file_is_read_by_some_source_and_none_reads_all() {
        let reads: Vec<Vec<&File>> = Source::ALL
            .iter()
            .map(|source| included(FILES, &format!("#include \"{}\"\n", source.file())))
            .collect();
        for file in FILES {
            assert!(reads.iter().any(|files| files.contains(&file)), "{}: by none", file.name);
        }
        assert!(reads.iter().all(|files| files.len() < FILES.len() / 2));
    }
}
