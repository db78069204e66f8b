//! Repeated measurements of one thing. The first of each is a warm-up and is never put in.

use crate::copies::median;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn add(&mut self, value: f64) {
        self.0.push(value);
        self.0.sort_by(f64::total_cmp);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Not a number if there are none.
    pub fn median(&self) -> f64 {
        median(&self.0)
    }

    pub fn min(&self) -> f64 {
        self.0.first().copied().unwrap_or(f64::NAN)
    }

    pub fn max(&self) -> f64 {
        self.0.last().copied().unwrap_or(f64::NAN)
    }

    /// Cells for a table: the median, the least and the greatest.
    pub fn cells(&self, decimals: usize) -> [String; 3] {
        [self.median(), self.min(), self.max()].map(|value| number(value, decimals))
    }
}

/// A number for a table; nothing for one that was not measured.
pub fn number(value: f64, decimals: usize) -> String {
    if value.is_finite() { format!("{value:.decimals$}") } else { String::new() }
}

impl FromIterator<f64> for Samples {
    fn from_iter<T: IntoIterator<Item = f64>>(values: T) -> Self {
        let mut samples = Self::default();
        values.into_iter().for_each(|value| samples.add(value));
        samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_told_by_their_median_and_ends() {
        let samples: Samples = [3.0, 1.0, 2.0].into_iter().collect();
        assert_eq!(samples.cells(1), ["2.0", "1.0", "3.0"]);
        assert_eq!(Samples::default().cells(1), ["", "", ""]);
    }
}
