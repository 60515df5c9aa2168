//! Rust source reduced to its code: comments and the insides of literals become spaces, so that a
//! rule about code is not tripped by a sentence or a string.

/// The same text, byte for byte as long and with the same lines, without comments and literals.
pub(super) fn code_only(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let length = match literal_or_comment(rest, at > 0 && is_word(bytes[at - 1])) {
            Some(length) => length,
            None => {
                at += 1;
                continue;
            }
        };
        for byte in &mut code[at..at + length] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at += length;
    }
    String::from_utf8(code).unwrap_or_default()
}

/// A byte of an identifier or a keyword.
pub(super) fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

/// Where `word` stands in `code` as a whole word.
pub(super) fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let bytes = code.as_bytes();
        let before = at.checked_sub(1).map(|i| bytes[i]);
        let after = bytes.get(at + word.len()).copied();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// The line of a byte, from 1.
pub(super) fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() + 1
}

/// Bytes of the comment or literal that starts here, if one does.
fn literal_or_comment(rest: &[u8], inside_word: bool) -> Option<usize> {
    match rest {
        [b'/', b'/', ..] => Some(until(rest, b"\n")),
        [b'/', b'*', ..] => Some(block_comment(rest)),
        [b'"', ..] => Some(quoted(rest, 0)),
        [b'\'', ..] => character(rest),
        [b'b' | b'c' | b'r', ..] if !inside_word => prefixed(rest),
        _ => None,
    }
}

/// Length up to `end`, which is left out, or of all.
fn until(rest: &[u8], end: &[u8]) -> usize {
    rest.windows(end.len()).position(|window| window == end).unwrap_or(rest.len())
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// A string whose quote is at `start`, with escapes.
fn quoted(rest: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// A character literal; `None` for a lifetime.
fn character(rest: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(&rest[..rest.len().min(16)]).or_else(|error| {
        // Cut in a character: what stands before it is enough.
        std::str::from_utf8(&rest[..error.valid_up_to()])
    });
    let mut inside = text.ok()?.char_indices().skip(1);
    match inside.next()? {
        (_, '\\') => {
            let close = rest[3..].iter().position(|&b| b == b'\'')?;
            Some(close + 4)
        }
        _ => match inside.next()? {
            (close, '\'') => Some(close + 1),
            _ => None,
        },
    }
}

/// `b"…"`, `c"…"`, `b'…'` and raw strings `r#"…"#`, `br"…"`.
fn prefixed(rest: &[u8]) -> Option<usize> {
    let letters = rest.iter().take_while(|b| b.is_ascii_alphabetic()).count();
    let raw = match &rest[..letters] {
        b"r" | b"br" | b"cr" => true,
        b"b" | b"c" => false,
        _ => return None,
    };
    if !raw {
        return match rest.get(letters)? {
            b'"' => Some(quoted(rest, letters)),
            b'\'' => character(&rest[letters..]).map(|length| length + letters),
            _ => None,
        };
    }
    let hashes = rest[letters..].iter().take_while(|&&b| b == b'#').count();
    let open = letters + hashes;
    if rest.get(open) != Some(&b'"') {
        return None;
    }
    let close = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
    let inside = until(&rest[open + 1..], &close);
    Some((open + 1 + inside + close.len()).min(rest.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(source: &str) -> String {
        let code = code_only(source);
        assert_eq!(code.len(), source.len());
        assert_eq!(code.lines().count(), source.lines().count());
        code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_literals_disappear() {
        assert_eq!(tokens("a // b\nc /* d /* e */ f */ g"), "a c g");
        assert_eq!(tokens(r#"f("x \" y", 'z', '\'', '\u{1F600}', b'q')"#), "f( , , , , )");
        assert_eq!(tokens(r###"f(r#"x " y"#, br"z\", c"w")"###), "f( , , )");
        assert_eq!(tokens("f('é', \"ü\")"), "f( , )");
    }

    #[test]
    fn lifetimes_and_raw_names_stay() {
        assert_eq!(tokens("fn f<'a>(x: &'a str)"), "fn f<'a>(x: &'a str)");
        assert_eq!(tokens("r#fn(bar, b)"), "r#fn(bar, b)");
    }

    #[test]
    fn words_are_whole() {
        let code = "unsafe_code unsafe {} not_unsafe";
        assert_eq!(words(code, "unsafe").collect::<Vec<_>>(), [12]);
        assert_eq!(line_of("a\nb\nc", 4), 3);
    }
}
