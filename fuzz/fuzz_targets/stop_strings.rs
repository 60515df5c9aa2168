//! Stop strings over text that arrives in pieces: any cut gives what the whole gives, and both give
//! what the definition says.
#![no_main]

use amphora_engine::stop::StopMatcher;
use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

/// Few letters, so that stop strings occur and overlap; of every length in UTF-8.
const ALPHABET: [char; 5] = ['a', 'b', 'é', '中', '🦀'];

#[derive(Debug, Arbitrary)]
struct Stream {
    stops: Vec<Vec<u8>>,
    text: Vec<u8>,
    /// Characters of each piece; what is left after them is the last piece.
    pieces: Vec<u8>,
}

fuzz_target!(|stream: Stream| {
    let word = |letters: &[u8]| -> String {
        letters.iter().map(|&l| ALPHABET[usize::from(l) % ALPHABET.len()]).collect()
    };
    let stops: Vec<String> = stream.stops.iter().map(|stop| word(stop)).collect();
    let text = word(&stream.text);
    let mut rest = text.as_str();
    let mut pieces = Vec::new();
    for &characters in &stream.pieces {
        let end = rest.char_indices().nth(usize::from(characters)).map_or(rest.len(), |(at, _)| at);
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    let expected = definition(&stops, &text);
    assert_eq!(run(&stops, &[text.as_str()]), expected, "{stops:?} {text:?} whole");
    assert_eq!(run(&stops, &pieces), expected, "{stops:?} {pieces:?}");
});

/// What a client sees, and whether a stop string ended it.
fn run(stops: &[String], pieces: &[&str]) -> (String, bool) {
    let mut matcher = StopMatcher::new(stops);
    let mut shown = String::new();
    for piece in pieces {
        let released = matcher.push(piece);
        shown.push_str(&released.text);
        if released.stopped {
            return (shown, true);
        }
    }
    shown.push_str(&matcher.flush());
    (shown, false)
}

/// The match that ends first ends the text, and of those that end together the longest.
fn definition(stops: &[String], text: &str) -> (String, bool) {
    for end in (1..=text.len()).filter(|&end| text.is_char_boundary(end)) {
        let ending = stops.iter().filter(|s| !s.is_empty() && text[..end].ends_with(s.as_str()));
        if let Some(longest) = ending.map(String::len).max() {
            return (text[..end - longest].to_owned(), true);
        }
    }
    (text.to_owned(), false)
}
