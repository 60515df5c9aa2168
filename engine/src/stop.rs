//! Stop strings in streamed text.
//!
//! Text arrives in pieces of any size. What could be the start of a stop string is held back until
//! more text decides; so a client never sees a stop string, nor any part of one that completed.
//! The match that *ends* first wins, and of two that end together the longer: this is the only rule
//! under which the way the text was cut into pieces makes no difference.

/// What a piece of text released.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Released {
    /// Text that is final and may be shown.
    pub text: String,
    /// Whether a stop string completed; the text before it is in `text`, the rest is dropped.
    pub stopped: bool,
}

/// Watches a stream of text for any of several stop strings.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The longest end of the text so far that begins a stop string.
    held: String,
}

impl StopMatcher {
    /// Empty strings would match everywhere; request validation refuses them and they are ignored here.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        StopMatcher { stops, held: String::new() }
    }

    /// Takes the next piece of text and releases what is decided.
    pub fn push(&mut self, piece: &str) -> Released {
        if self.stops.is_empty() {
            return Released { text: piece.to_owned(), stopped: false };
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        if let Some(start) = self.first_match(&text) {
            text.truncate(start);
            return Released { text, stopped: true };
        }
        self.held = text.split_off(self.hold_from(&text));
        Released { text, stopped: false }
    }

    /// The stream has ended: what was held is ordinary text.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Start of the match that ends first. A match that began in text already released cannot exist,
    /// because its beginning would have been held.
    fn first_match(&self, text: &str) -> Option<usize> {
        self.stops
            .iter()
            .filter_map(|stop| text.find(stop.as_str()).map(|start| (start + stop.len(), start)))
            .min()
            .map(|(_, start)| start)
    }

    /// Where the longest suffix that is the beginning of a stop string starts.
    fn hold_from(&self, text: &str) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let near = text.len().saturating_sub(longest);
        text.char_indices()
            .map(|(at, _)| at)
            .filter(|&at| at >= near)
            .find(|&at| {
                let tail = &text.as_bytes()[at..];
                self.stops.iter().any(|stop| stop.as_bytes().starts_with(tail))
            })
            .unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut out = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            out.push_str(&released.text);
            if released.stopped {
                return (out, true);
            }
        }
        out.push_str(&matcher.flush());
        (out, false)
    }

    #[test]
    fn text_before_the_stop_is_shown_and_the_stop_is_not() {
        assert_eq!(run(&["END"], &["one E", "N", "D two"]), ("one ".into(), true));
    }

    #[test]
    fn a_false_start_is_released() {
        assert_eq!(run(&["END"], &["E", "N", "x"]), ("ENx".into(), false));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b!"]), ("a".into(), true));
    }

    #[test]
    fn the_end_of_the_stream_releases_what_was_held() {
        assert_eq!(run(&["END"], &["so EN"]), ("so EN".into(), false));
    }

    #[test]
    fn the_match_that_ends_first_wins() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]), ("xa".into(), true));
        assert_eq!(run(&["bc", "abc"], &["xabc"]), ("x".into(), true));
    }

    #[test]
    fn nothing_is_held_without_stop_strings() {
        let mut matcher = StopMatcher::new(&[]);
        assert_eq!(matcher.push("abc").text, "abc");
    }

    #[test]
    fn the_cut_into_pieces_makes_no_difference() {
        let alphabet = ['a', 'b', 'é', '中'];
        let mut rng = Rng::new(7);
        for _ in 0..4000 {
            let word = |rng: &mut Rng, most: usize| -> String {
                (0..1 + rng.below(most)).map(|_| alphabet[rng.below(alphabet.len())]).collect()
            };
            let stops: Vec<String> = (0..rng.below(4)).map(|_| word(&mut rng, 4)).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let text = word(&mut rng, 14);
            let chars: Vec<char> = text.chars().collect();
            let mut pieces = Vec::new();
            let mut at = 0;
            while at < chars.len() {
                let n = rng.below(4).min(chars.len() - at);
                pieces.push(chars[at..at + n].iter().collect::<String>());
                at += n;
            }
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(run(&stops, &pieces), run(&stops, &[&text]), "{stops:?} {pieces:?}");
        }
    }
}
