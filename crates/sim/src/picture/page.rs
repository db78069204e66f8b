//! One page of HTML with everything: it opens without a network, and each picture has its table.

use std::fmt::Write;

use super::escaped;

/// A table: its head, and its rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// What it shows.
    pub caption: String,
    /// The names of the columns.
    pub head: Vec<String>,
    /// As many words in each as there are columns.
    pub rows: Vec<Vec<String>>,
}

/// A part of the page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The beginning of a section.
    Heading(String),
    /// Words.
    Paragraph(String),
    /// A picture as SVG, from this crate.
    Picture(String),
    /// A table.
    Table(Table),
}

const STYLE: &str = "
:root{color-scheme:light dark;--ground:#fff;--text:#1c1e21;--line:#c9ced6;--head:#eef0f3}
@media (prefers-color-scheme: dark){:root{--ground:#16181b;--text:#e7e9ec;--line:#3a3f47;--head:#22262b}}
body{background:var(--ground);color:var(--text);font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
figure{margin:1.5rem 0;overflow-x:auto} svg{max-width:100%;height:auto}
.scroll{overflow-x:auto} .scroll:focus-visible{outline:2px solid #1f6fb2}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:1rem 0}
caption{text-align:left;font-weight:600;padding:.3rem 0} th,td{border:1px solid var(--line);padding:.25rem .6rem;text-align:right}
th{background:var(--head)} th:first-child,td:first-child{text-align:left}
";

/// The page.
pub fn page(title: &str, parts: &[Part]) -> String {
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{0}</title>\n<style>{STYLE}</style>\n</head>\n\
         <body>\n<main>\n<h1>{0}</h1>\n",
        escaped(title)
    );
    for (index, part) in parts.iter().enumerate() {
        match part {
            Part::Heading(words) => {
                let _ = writeln!(html, "<h2>{}</h2>", escaped(words));
            }
            Part::Paragraph(words) => {
                let _ = writeln!(html, "<p>{}</p>", escaped(words));
            }
            // Several pictures on one page: each has names of its own.
            Part::Picture(svg) => {
                let own = svg
                    .replacen(
                        "aria-labelledby=\"title description\"",
                        &format!("aria-labelledby=\"t{index} d{index}\""),
                        1,
                    )
                    .replacen("<title id=\"title\">", &format!("<title id=\"t{index}\">"), 1)
                    .replacen("<desc id=\"description\">", &format!("<desc id=\"d{index}\">"), 1);
                let _ = writeln!(html, "<figure>\n{own}</figure>");
            }
            Part::Table(table) => {
                let _ = writeln!(
                    html,
                    "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\">\n<table>\n<caption>{0}</caption>",
                    escaped(&table.caption)
                );
                let cells = |tag: &str, words: &[String]| {
                    words.iter().fold(String::new(), |mut all, word| {
                        let _ = write!(
                            all,
                            "<{tag}>{}</{}>",
                            escaped(word),
                            tag.split(' ').next().unwrap_or(tag)
                        );
                        all
                    })
                };
                let _ = writeln!(
                    html,
                    "<thead><tr>{}</tr></thead>\n<tbody>",
                    cells("th scope=\"col\"", &table.head)
                );
                for row in &table.rows {
                    let _ = writeln!(html, "<tr>{}</tr>", cells("td", row));
                }
                html.push_str("</tbody>\n</table>\n</div>\n");
            }
        }
    }
    html.push_str("</main>\n</body>\n</html>\n");
    html
}
