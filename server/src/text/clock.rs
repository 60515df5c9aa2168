//! `strftime_now`: the date that some chat templates put into the system message, in UTC.

/// Formats `seconds` since 1970 in UTC by the `strftime` codes that chat templates use; the
/// first unknown code is the error.
pub fn strftime(format: &str, seconds: u64) -> Result<String, char> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] =
        ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

    let days = seconds / 86_400;
    let second_of_day = seconds % 86_400;
    let (hour, minute, second) =
        (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let date = Date::from_days(days);
    let month = MONTHS[date.month - 1];
    let weekday = DAYS[(days % 7) as usize];

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let code = chars.next().unwrap_or('%');
        out.push_str(&match code {
            'Y' => format!("{:04}", date.year),
            'y' => format!("{:02}", date.year % 100),
            'm' => format!("{:02}", date.month),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => format!("{:02}", date.day),
            'e' => format!("{:2}", date.day),
            'j' => format!("{:03}", date.day_of_year),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'F' => format!("{:04}-{:02}-{:02}", date.year, date.month, date.day),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            other => return Err(other),
        });
    }
    Ok(out)
}

/// A date of the Gregorian calendar; `month` counts from 1.
struct Date {
    year: u64,
    month: usize,
    day: u64,
    day_of_year: u64,
}

impl Date {
    fn from_days(mut days: u64) -> Self {
        let mut year = 1970;
        loop {
            let length = if is_leap(year) { 366 } else { 365 };
            if days < length {
                break;
            }
            days -= length;
            year += 1;
        }
        let february = if is_leap(year) { 29 } else { 28 };
        let day_of_year = days + 1;
        let mut month = 1;
        for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            if days < length {
                break;
            }
            days -= length;
            month += 1;
        }
        Self { year, month, day: days + 1, day_of_year }
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(strftime("%d %b %Y", 0).as_deref(), Ok("01 Jan 1970"));
        assert_eq!(
            strftime("%A %e %B %Y %j", 951_782_400).as_deref(),
            Ok("Tuesday 29 February 2000 060")
        );
        assert_eq!(
            strftime("%F %T %I %p", 1_796_029_199).as_deref(),
            Ok("2026-11-30 08:59:59 08 AM")
        );
        assert_eq!(strftime("100%%", 0).as_deref(), Ok("100%"));
        assert_eq!(strftime("%Q", 0), Err('Q'));
    }
}
